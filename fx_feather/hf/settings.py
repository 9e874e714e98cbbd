"""The settings of `config.json`, in the words of older and newer releases, and what of them this package can't do."""

from collections.abc import Mapping
from typing import Any

import torch

from ..errors import ShapeError, message, raise_all
from ..nn.rope_scaling import Dynamic, Linear, Llama3, Scaling, Yarn

Json = dict[str, Any]

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Settings:
    """A `config.json` while it is read: what is missing or can't be done is collected, and raised as one error."""

    def __init__(self, json: Mapping[str, Any], where: str):
        self.json, self.where = json, where
        self.found: list[str] = []

    def get(self, *keys: str, default: Any = ...) -> Any:
        """The first of these keys that is there and not null; the default otherwise."""
        for key in keys:
            if self.json.get(key) is not None:
                return self.json[key]
        if default is ...:
            self.offend(keys[0], f"{' or '.join(map(repr, keys))} is missing", "a config names every size of its model")
            return 1
        return default

    def offend(self, key: str, number: str, rule: str, fix: str = "another checkpoint") -> None:
        """Adds a message about one key."""
        got = f"{key}={self.json.get(key)!r}"
        self.found.append(message(call=f"{self.where}, key {key!r}", got=got, number=number, rule=rule, fix=fix))

    def only(self, key: str, *values: Any, default: Any) -> None:
        """This package does a setting with one of these values only."""
        value = self.json.get(key, default)
        if value not in values:
            known = " or ".join(map(repr, values))
            self.offend(key, f"{value!r} is not {known}", f"models of this kind are here with {key}={known} only")

    def dtype(self) -> torch.dtype:
        """The dtype of the parameters (`dtype`, before `torch_dtype`)."""
        name = str(self.get("dtype", "torch_dtype", default="float32")).removeprefix("torch.")
        if name not in DTYPES:
            self.offend("dtype", f"{name!r} is no dtype of a model", f"one of {', '.join(DTYPES)}")
        return DTYPES.get(name, torch.float32)

    def rope(self, theta: float) -> tuple[float, Scaling | None]:
        """The base and the scaling of rotary positions (`rope_parameters`, before `rope_theta` and `rope_scaling`)."""
        newer = self.json.get("rope_parameters") or {}
        rope = self.json.get("rope_scaling") or newer
        base = float(rope.get("rope_theta") or newer.get("rope_theta") or self.json.get("rope_theta") or theta)
        kind = rope.get("rope_type") or rope.get("type") or "default"
        trained = rope.get("original_max_position_embeddings") or self.json.get("max_position_embeddings")
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            self.offend("rope_parameters", "partial_rotary_factor is not 1", "all features of a head are turned")
        try:
            return base, _scaling(kind, rope, trained, self.json.get("max_position_embeddings"))
        except KeyError as e:
            self.offend("rope_parameters", f"{e.args[0]!r} is missing", f"rope of kind {kind!r} needs it")
        except NotImplementedError:
            known = "default, linear, dynamic, yarn, llama3"
            self.offend("rope_parameters", f"rope of kind {kind!r}", f"the kinds here are {known}")
        return base, None

    def raise_all(self) -> None:
        """Raises one ShapeError with all that was found; does nothing when there is none."""
        raise_all(ShapeError, self.found)


def _scaling(kind: str, rope: Mapping[str, Any], trained: Any, longest: Any) -> Scaling | None:
    match kind:
        case "default":
            return None
        case "linear":
            return Linear(factor=rope["factor"])
        case "dynamic":
            return Dynamic(factor=rope["factor"], trained=longest)
        case "llama3":
            return Llama3(
                factor=rope["factor"], trained=trained, low=rope["low_freq_factor"], high=rope["high_freq_factor"]
            )
        case "yarn":
            factor = rope.get("factor")
            return Yarn(
                factor=longest / trained if factor is None else factor,
                trained=trained,
                beta_fast=rope.get("beta_fast") or 32.0,
                beta_slow=rope.get("beta_slow") or 1.0,
                mscale=rope.get("mscale"),
                mscale_all_dim=rope.get("mscale_all_dim"),
                attention_factor=rope.get("attention_factor"),
                truncate=rope.get("truncate", True),
            )
    raise NotImplementedError(kind)


def rope_json(theta: float, scaling: Scaling | None, source: Mapping[str, Any]) -> Json:
    """The keys of rotary positions, in the words of newer and of older releases.

    >>> rope_json(100.0, Linear(factor=2.0), {})["rope_parameters"]
    {'rope_type': 'linear', 'factor': 2.0, 'rope_theta': 100.0}
    """
    rope: Json = {"rope_type": "default"}
    match scaling:
        case Linear():
            rope = {"rope_type": "linear", "factor": scaling.factor}
        case Dynamic():
            rope = {"rope_type": "dynamic", "factor": scaling.factor}
        case Llama3():
            rope = {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low,
                "high_freq_factor": scaling.high,
                "original_max_position_embeddings": scaling.trained,
            }
        case Yarn():
            rope = {"rope_type": "yarn", "factor": scaling.factor}
            rope["original_max_position_embeddings"] = scaling.trained
            rope |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow, "truncate": scaling.truncate}
            options = ("mscale", "mscale_all_dim", "attention_factor")
            rope |= {k: getattr(scaling, k) for k in options if getattr(scaling, k) is not None}
    out: Json = {"rope_parameters": {**rope, "rope_theta": theta}, "rope_theta": theta}
    out["rope_scaling"] = None if scaling is None else {**rope, "rope_theta": theta}
    if isinstance(scaling, Dynamic):
        # This kind takes the trained length from the longest one that the model is for.
        out["max_position_embeddings"] = scaling.trained
    elif "max_position_embeddings" not in source:
        trained = getattr(scaling, "trained", 4096)
        out["max_position_embeddings"] = int(trained * getattr(scaling, "factor", 1))
    return out


def dtype_json(dtype: torch.dtype) -> Json:
    """The keys of the parameters' dtype.

    >>> dtype_json(torch.bfloat16)
    {'dtype': 'bfloat16', 'torch_dtype': 'bfloat16'}
    """
    name = str(dtype).removeprefix("torch.")
    return {"dtype": name, "torch_dtype": name}
