"""The settings of `config.json`, in the words of older and newer releases, and what of them this package can't do."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from ..errors import ShapeError, message, raise_all
from ..nn.rope_scaling import Dynamic, Linear, Llama3, Scaling, Yarn

Json = dict[str, Any]

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}

_WORDS = {"rope_type", "type", "truncate"}
"""Keys of rope that are no numbers."""


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


class Settings:
    """A `config.json` while it is read: what is missing or can't be done is collected, and raised as one error.

    Args:
        json: the settings.
        where: the file that they are from.
        defaults: of keys that are missing, the family's own.
    """

    def __init__(self, json: Mapping[str, Any], where: str, defaults: Mapping[str, Any] = MappingProxyType({})):
        self.json, self.where, self.defaults = json, where, defaults
        self.found: list[str] = []

    def get(self, *keys: str) -> Any:
        """The first of these keys that is there and not null; the family's default of one of them otherwise."""
        for key in keys:
            if self.json.get(key) is not None:
                return self.json[key]
        default = next((self.defaults[key] for key in keys if key in self.defaults), ...)
        if default is ... or (default is not None and any(key in self.json for key in keys)):
            state = "null" if any(key in self.json for key in keys) else "missing"
            self.offend(keys[0], f"{' or '.join(map(repr, keys))} is {state}", "a config names every size of its model")
            return 1
        return default

    def flag(self, key: str) -> bool:
        """A setting that is true or false."""
        value = self.get(key)
        if not isinstance(value, bool):
            self.offend(key, f"{value!r} is neither true nor false", "this setting is true or false", f'"{key}": true')
        return value is True

    def number(self, key: str) -> float:
        """A setting that is a finite number."""
        value = self.get(key)
        if not _number(value):
            self.offend(key, f"{value!r} is no finite number", "this setting is a number", f'"{key}": 1.0')
            return 1.0
        return float(value)

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
        name = str(self.json.get("dtype") or self.json.get("torch_dtype") or "float32").removeprefix("torch.")
        if name not in DTYPES:
            self.offend("dtype", f"{name!r} is no dtype of a model", f"one of {', '.join(DTYPES)}")
        return DTYPES.get(name, torch.float32)

    def rope(self, theta: float) -> tuple[float, Scaling | None]:
        """The base and the scaling of rotary positions (`rope_parameters`, before `rope_theta` and `rope_scaling`)."""
        for key in ("rope_parameters", "rope_scaling"):
            if not isinstance(self.json.get(key) or {}, Mapping):
                self.offend(
                    key, f"it is a {type(self.json[key]).__name__}, not an object", "rope is named by an object"
                )
                return theta, None
        newer = self.json.get("rope_parameters") or {}
        rope = self.json.get("rope_scaling") or newer
        longest = self.json.get("max_position_embeddings")
        trained = rope.get("original_max_position_embeddings") or longest
        base = rope.get("rope_theta") or newer.get("rope_theta") or self.json.get("rope_theta") or theta
        kind = rope.get("rope_type") or rope.get("type") or "default"
        numbers = {k: v for k, v in rope.items() if k not in _WORDS} | {"rope_theta": base}
        numbers |= {"max_position_embeddings": longest, "original_max_position_embeddings": trained}
        wrong = [f"{k}={v!r}" for k, v in numbers.items() if v is not None and not _number(v)]
        wrong += [f"{k}={rope[k]!r}" for k in ("truncate",) if not isinstance(rope.get(k, True), bool)]
        if wrong:
            self.offend("rope_parameters", f"{', '.join(wrong)}: no finite number", "rope is made of numbers")
            return theta, None
        if rope.get("partial_rotary_factor", self.json.get("partial_rotary_factor")) not in (None, 1.0):
            self.offend("rope_parameters", "partial_rotary_factor is not 1", "all features of a head are turned")
        try:
            return float(base), _scaling(kind, rope, trained, longest)
        except KeyError as e:
            self.offend("rope_parameters", f"{e.args[0]!r} is missing", f"rope of kind {kind!r} needs it")
        except NotImplementedError:
            known = "default, linear, dynamic, yarn, llama3"
            self.offend("rope_parameters", f"rope of kind {kind!r}", f"the kinds here are {known}")
        return theta, None

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
            if longest is None:
                raise KeyError("max_position_embeddings")
            return Dynamic(factor=rope["factor"], trained=longest)
        case "llama3":
            if trained is None:
                raise KeyError("original_max_position_embeddings")
            return Llama3(
                factor=rope["factor"], trained=trained, low=rope["low_freq_factor"], high=rope["high_freq_factor"]
            )
        case "yarn":
            if trained is None:
                raise KeyError("original_max_position_embeddings")
            factor = rope.get("factor")
            if factor is None and longest is None:
                raise KeyError("factor")
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
