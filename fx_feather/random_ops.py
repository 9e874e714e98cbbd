"""Torch's random operators by name: what each gives, from its arguments and draws by a key."""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, fx

from .errors import FeatherError, RuleError, fail
from .source import user_line

Draw = Callable[..., Tensor]


def _like(kind: str, *names: str) -> Callable[[Draw, dict[str, Any]], Tensor]:
    def lower(draw: Draw, a: dict[str, Any]) -> Tensor:
        return draw(kind, [float(a[n]) for n in names], like=a["self"], dtype=a.get("dtype"))

    return lower


def _made(kind: str, *args: float) -> Callable[[Draw, dict[str, Any]], Tensor]:
    def lower(draw: Draw, a: dict[str, Any]) -> Tensor:
        return draw(kind, args, like=a.get("self"), size=a.get("size"), dtype=a.get("dtype"))

    return lower


def _integers(draw: Draw, a: dict[str, Any]) -> Tensor:
    like = a.get("self")
    dtype = a.get("dtype") or (torch.int64 if like is None else like.dtype)
    return draw("integers", (a.get("low", 0), a["high"]), like=like, size=a.get("size"), dtype=dtype)


def _random(draw: Draw, a: dict[str, Any]) -> Tensor:
    dtype = a["self"].dtype
    digits = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8, torch.bool: 1}
    top = a.get("to") or (1 << digits[dtype] if dtype in digits else torch.iinfo(dtype).max + 1)
    return draw("integers", (a.get("from", 0), top), like=a["self"])


def _bernoulli(draw: Draw, a: dict[str, Any]) -> Tensor:
    x, p = a["self"], a.get("p")
    if p is not None and not isinstance(p, Tensor):
        return draw("bernoulli", (p,), like=x)
    p = x if p is None else p
    return (draw("uniform", (0.0, 1.0), like=x, dtype=p.dtype) < p).to(x.dtype)


def _normal(draw: Draw, a: dict[str, Any]) -> Tensor:
    mean, std, x = a.get("mean", 0.0), a.get("std", 1.0), a.get("self")
    tensors = [t for t in (mean, std) if isinstance(t, Tensor)]
    if not tensors:
        return draw("normal", (mean, std), like=x, size=a.get("size"), dtype=a.get("dtype"))
    like = x if x is not None else tensors[0] if len(tensors) == 1 else tensors[0] + tensors[1]
    return draw("normal", (0.0, 1.0), like=like) * std + mean


def _log_normal(draw: Draw, a: dict[str, Any]) -> Tensor:
    return draw("normal", (a["mean"], a["std"]), like=a["self"]).exp()


def _permutation(draw: Draw, a: dict[str, Any]) -> Tensor:
    order = draw("uniform", (0.0, 1.0), size=[a["n"]], dtype=torch.float64).argsort()
    return order.to(a.get("dtype") or torch.int64)


def _native_dropout(draw: Draw, a: dict[str, Any]) -> tuple[Tensor, Tensor]:
    x, p = a["input"], a["p"]
    mask = draw("bernoulli", (1.0 - p,), like=x, dtype=torch.bool)
    return x * mask * (1.0 / (1.0 - p) if p < 1 else 0.0), mask


def _dropout(draw: Draw, a: dict[str, Any]) -> Tensor:
    return a["input"] * draw("keep", (1.0 - a["p"],), like=a["input"]) if a["p"] < 1 else a["input"] * 0.0


def _feature_dropout(draw: Draw, a: dict[str, Any]) -> Tensor:
    if a["p"] == 1:
        return a["input"] * 0.0
    return a["input"] * draw("keep", (1.0 - a["p"],), like=_one_a_feature(a["input"]))


def _one_a_feature(x: Tensor) -> Tensor:
    for d in range(2, x.ndim):
        x = x.amax(d, keepdim=True)
    return x.detach()


def _alpha_dropout(draw: Draw, a: dict[str, Any], like: Tensor | None = None) -> Tensor:
    """Klambauer et al. 2017, section 3: what is dropped becomes the value that SELU saturates at."""
    x, p, alpha = a["input"], a["p"], 1.7580993408473766
    if p == 1:
        return x * 0.0
    keep = draw("bernoulli", (1.0 - p,), like=x if like is None else like)
    scale = ((alpha * alpha * p + 1.0) * (1.0 - p)) ** -0.5
    return x * (keep * scale) + ((keep - 1.0) * (alpha * scale) + alpha * scale * p)


def _attention(draw: Draw, a: dict[str, Any]) -> Tensor:
    q, k, v, mask, p = a["query"], a["key"], a["value"], a["attn_mask"], a["dropout_p"]
    scale = (q.shape[-1] ** -0.5 if a["scale"] is None else a["scale"]) ** 0.5
    if a.get("enable_gqa") and k.shape[-3] != q.shape[-3]:
        groups = q.shape[-3] // k.shape[-3]
        k, v = (x.unsqueeze(-3).expand(*x.shape[:-2], groups, *x.shape[-2:]).flatten(-4, -3) for x in (k, v))
    scores = torch.matmul(q * scale, (k * scale).transpose(-2, -1))
    if a["is_causal"]:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(mask.logical_not(), float("-inf"))
    elif mask is not None:
        scores = scores + mask
    weights = torch.softmax(scores, -1)
    return torch.matmul(weights * draw("keep", (1.0 - p,), like=weights), v)


#: By the operator's name: what gives its result from its arguments and draws.
_LOWER: dict[str, Callable[[Draw, dict[str, Any]], Any]] = {
    "rand": _made("uniform", 0.0, 1.0),
    "rand_like": _made("uniform", 0.0, 1.0),
    "randn": _made("normal", 0.0, 1.0),
    "randn_like": _made("normal", 0.0, 1.0),
    "randint": _integers,
    "randint_like": _integers,
    "random": _random,
    "randperm": _permutation,
    "bernoulli": _bernoulli,
    "uniform": _like("uniform", "from", "to"),
    "normal": _normal,
    "normal_functional": _normal,
    "log_normal": _log_normal,
    "exponential": _like("exponential", "lambd"),
    "native_dropout": _native_dropout,
    "dropout": _dropout,
    "feature_dropout": _feature_dropout,
    "alpha_dropout": _alpha_dropout,
    "feature_alpha_dropout": lambda draw, a: _alpha_dropout(draw, a, _one_a_feature(a["input"])),
    "scaled_dot_product_attention": _attention,
}


def name_of(op: Any) -> str:
    """The name of an operator, without namespace and overload."""
    return op._schema.name.rpartition("::")[2] if isinstance(op, torch._ops.OpOverload) else ""


def is_random(op: Any) -> bool:
    """Whether torch says that an operator draws."""
    return torch.Tag.nondeterministic_seeded in getattr(op, "tags", ()) and op.namespace == "aten"


def may_draw(op: Any) -> bool:
    """Whether an operator draws, as far as its name tells."""
    return name_of(op).rstrip("_") in _LOWER or is_random(op)


def arguments(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an operator by name, those left out by their default."""
    schema = op._schema.arguments
    # A dtype that is left out is a number in the schema.
    given = {s.name: s.default_value for s in schema if s.has_default_value() and s.name != "dtype"}
    given |= dict(zip((s.name for s in schema), args, strict=False)) | kwargs
    # In place, dropout calls what it reads otherwise.
    return {"input": given["self"], **given} if name_of(op).endswith("dropout_") else given


def draws(op: Any, a: dict[str, Any]) -> bool:
    """Whether an operator draws when it is called so."""
    name = name_of(op).rstrip("_")
    if "dropout_p" in a:  # attention, in any of its kernels, and the choice among them
        return a["dropout_p"] > 0 and name != "_fused_sdp_choice"
    if not a.get("training", True) or not a.get("train", True) or a.get("dropout", 1) == 0:
        return False
    if name.endswith("dropout") and (a["p"] == 0 or not a["input"].numel()):
        return False
    return may_draw(op)


def refuse_generator(name: str, where: str) -> NoReturn:
    """What a generator given by hand is told."""
    fail(
        FeatherError,
        call=f"{name}(..., generator=...) at {where}",
        got="a torch.Generator",
        number="1 generator would be another one on each rank, and go on from call to call",
        rule="random numbers are functions of a key: the same bits in every layout, and when they are computed again",
        fix=f"leave generator= out, and set compile_step(..., seed=...); or ff.random.normal(key, shape) with a key of "
        f"your own, such as a leaf of the batch (in the place of {name})",
    )


def check_region(graph: fx.Graph, call: str) -> None:
    """Raises FeatherError if per-rank code draws by anything but a key."""
    for n in graph.nodes:
        if n.op == "call_function" and may_draw(n.target):
            fail(
                FeatherError,
                call=f"{name_of(n.target)} in {call}, at {user_line(n)}",
                got="an operator that draws random numbers, in per-rank code",
                number="1 draw would be the same on each rank, or another one: nothing says which",
                rule="per-rank code sees no place in a whole tensor, which random numbers go by",
                fix="draw outside of the region; or ff.random.normal(key, shape) with ff.random.fold_in(key, "
                'ff.axis_index("dp")) as the key of each rank',
            )


def refuse_kind(op: Any, where: str) -> NoReturn:
    """What an operator that is not known as a function of draws is told."""
    fail(
        RuleError,
        call=f"{op} at {where}",
        got="an operator that draws random numbers",
        number=f"how {name_of(op)} draws is not known as a function of a key",
        rule="random numbers are functions of a key: the same bits in every layout, and when they are computed again",
        fix="write it with those that are: torch.rand, randn, randint, randperm, bernoulli, normal_, uniform_, "
        "exponential_, dropout, or ff.random",
    )


def value(op: Any, a: dict[str, Any], draw: Draw, where: str) -> Any:
    """What an operator gives, from its arguments by name; `where` is the user's line.

    Raises:
        FeatherError: a generator among the arguments.
        RuleError: an operator that is not known as a function of draws.
    """
    if a.get("generator") is not None:
        refuse_generator(name_of(op), where)
    lower = _LOWER.get(name_of(op).rstrip("_"))
    if lower is None:
        refuse_kind(op, where)
    return lower(draw, a)
