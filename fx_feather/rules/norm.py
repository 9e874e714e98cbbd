"""Rules of normalisations: the normalised dims stay whole, or the norm is written in simpler operators."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .pointwise import named, sets, sizes_of
from .reduce import wide
from .rule import Factors, OpCall, Rule, Sharding, register


def _normalised(call: OpCall) -> Sharding:
    x, *rest = call.operands
    size = len(call.args[1])
    factors = named(x.shape)
    own = factors[x.ndim - size :]
    # Per-row statistics that some variants also return keep the other dims.
    statistics = tuple(() if i >= x.ndim - size else f for i, f in enumerate(factors))
    results = (factors, *(statistics for _ in call.outs[1:]))
    whole = frozenset(f for d in own for f in d)
    return Sharding(
        (factors, *(own for _ in rest)),
        results,
        sizes_of((factors, x.shape)),
        whole=whole,
        linear=sets([w for w in rest if w is call.arg(2, "weight")]) if len(rest) == 1 else (),
    )


def rms_norm(x: Tensor, normalized_shape: Sequence[int], weight: Any = None, eps: float | None = None) -> Tensor:
    """`torch.nn.functional.rms_norm` in operators that may be split."""
    dims = list(range(x.dim() - len(normalized_shape), x.dim()))
    exact = x.to(wide(x.dtype))
    eps = torch.finfo(exact.dtype).eps if eps is None else eps
    out = exact * torch.rsqrt((exact * exact).mean(dims, True) + eps)
    return (out if weight is None else out * weight).to(x.dtype)


def layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    """`torch.nn.functional.layer_norm` in operators that may be split."""
    dims = list(range(x.dim() - len(normalized_shape), x.dim()))
    return _centred(x, dims, weight, bias, eps)


def _centred(x: Tensor, dims: list[int], weight: Any, bias: Any, eps: float) -> Tensor:
    exact = x.to(wide(x.dtype))
    off = exact - exact.mean(dims, True)
    out = off * torch.rsqrt((off * off).mean(dims, True) + eps)
    out = out if weight is None else out * weight
    return (out if bias is None else out + bias).to(x.dtype)


register("rms_norm.default", Rule(_normalised, rms_norm, text="... !d, !d -> ... !d"))
register("layer_norm.default", Rule(_normalised, layer_norm, text="... !d, !d, !d -> ... !d"))


def _group_norm(call: OpCall) -> Sharding:
    x, *rest = call.operands
    groups = call.args[1]
    space: Factors = tuple((f"s{i}",) for i in range(x.ndim - 2))
    factors: Factors = (("n",), ("g", "c"), *space)
    sizes = {"n": x.shape[0], "g": groups, "c": x.shape[1] // groups, **sizes_of((space, x.shape[2:]))}

    def rewrite(args: tuple[Any, ...], kwargs: dict[str, Any], shapes: list[tuple[int, ...]]) -> Any:
        return (args[0], shapes[0][1] // sizes["c"], *args[2:]), kwargs

    return Sharding(
        (factors, *((("g", "c"),) for _ in rest)),
        (factors,),
        sizes,
        whole=frozenset({"c", *(f for d in space for f in d)}),
        rewrite=rewrite,
    )


def group_norm(
    x: Tensor, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, cudnn_enabled: bool = True
) -> Tensor:
    """`torch.nn.functional.group_norm` in operators that may be split."""
    shape = list(x.shape)
    grouped = x.reshape(shape[0], num_groups, shape[1] // num_groups, *shape[2:])
    per_channel = [num_groups, shape[1] // num_groups] + [1] * (len(shape) - 2)
    parts = [p if p is None else p.reshape(per_channel) for p in (weight, bias)]
    return _centred(grouped, list(range(2, grouped.dim())), parts[0], parts[1], eps).reshape(shape)


register("group_norm.default", Rule(_group_norm, group_norm, text="n (g !c) !..., (g !c), (g !c) -> n (g !c) !..."))
