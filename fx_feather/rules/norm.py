"""Rules of normalisations: the normalised dims stay whole, or the norm is written in simpler operators."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .handwritten import by_hand
from .local import Local
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


def _rms(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """RMS norm over the last dim, and what each row is multiplied by; one pass for the norms, two for the result."""
    squares = torch.linalg.vector_norm(x, 2, -1, True).square()
    scale = torch.rsqrt(squares / x.shape[-1] + eps)
    return x * scale * weight, scale


def _rms_vjp(cts: Any, outs: Any, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    # With u = ct * x both sums over rows and over columns are products of a matrix and a vector.
    ct, scale, d = cts[0], outs[1], x.shape[-1]
    u = (ct * x).reshape(-1, d)
    of_weight = torch.mv(u.t(), scale.reshape(-1))
    along = torch.mv(u, weight).reshape(scale.shape)
    return torch.addcmul(ct * weight * scale, x, along * scale.pow(3) / -d), of_weight


def _run_rms(local: Local, operands: Sequence[Tensor]) -> Any:
    """The local call: torch's own formula takes twice the passes, and keeps another copy of what comes in."""
    x, *weight = operands
    alike = [w for w in weight if w.ndim == 1 and w.dtype == x.dtype == wide(x.dtype)]
    if not alike:
        return local.plain(operands)
    eps = local.call.arg(3, "eps")
    return by_hand(_rms, _rms_vjp, (x, *alike, torch.finfo(x.dtype).eps if eps is None else eps))[0]


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


def _rms_normalised(call: OpCall) -> Sharding:
    return dataclasses.replace(_normalised(call), run=_run_rms)


register("rms_norm.default", Rule(_rms_normalised, rms_norm, text="... !d, !d -> ... !d"))
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
