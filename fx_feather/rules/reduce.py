"""Rules of reductions: a factor is summed over, or stays whole unless simpler operators can do the same."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .local import Local, fill
from .pointwise import named, sets, sizes_of
from .rule import Factors, OpCall, Rule, Sharding, register

aten = torch.ops.aten

_library = torch.library.Library("fx_feather", "FRAGMENT")
_library.define("fill_padding(Tensor x, int[] dim, float value) -> Tensor")
_library.define("amax_nograd(Tensor x, int[] dim, bool keepdim) -> Tensor")
_library.define("amin_nograd(Tensor x, int[] dim, bool keepdim) -> Tensor")
# A whole value has no padding. The copy keeps an alias from hiding it in a trace. Composite, so that each is
# differentiable by its parts and still one node of a trace before dispatch.
_library.impl("fill_padding", lambda x, dim, value: x.clone(), "CompositeImplicitAutograd")
_library.impl("amax_nograd", lambda x, dim, keepdim: x.detach().amax(dim, keepdim), "CompositeImplicitAutograd")
_library.impl("amin_nograd", lambda x, dim, keepdim: x.detach().amin(dim, keepdim), "CompositeImplicitAutograd")

Dims = int | Sequence[int] | None


def reduced_dims(dim: Dims, ndim: int) -> tuple[int, ...]:
    """The dims that a `dim` argument names, not negative; all where it names none."""
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return tuple(range(ndim))
    many = (dim,) if isinstance(dim, int) else tuple(dim)
    return tuple(sorted(d % max(ndim, 1) for d in many)) if ndim else ()


def reducing(call: OpCall, dim: Dims, keepdim: bool, **more: Any) -> Sharding:
    """The factors of a call that reduces dims of its operand."""
    x = call.operands[0]
    factors = named(x.shape)
    dims = reduced_dims(dim, x.ndim)
    kept: Factors = tuple(() if i in dims else f for i, f in enumerate(factors) if keepdim or i not in dims)
    out = tuple(kept for _ in call.outs)
    return Sharding((factors,), out, sizes_of((factors, x.shape)), **more)


def reduced_factors(call: OpCall, dim: Dims) -> frozenset[str]:
    """Names of the factors that such a call reduces."""
    return frozenset(f"d{i}" for i in reduced_dims(dim, call.operands[0].ndim))


def whole_reduction(dim_at: int | None, keepdim_at: int | None) -> Callable[[OpCall], Sharding]:
    """Shard function of a reduction whose dims stay whole; positions of `dim` and `keepdim` in its arguments."""

    def shard(call: OpCall) -> Sharding:
        dim = None if dim_at is None else call.arg(dim_at, "dim")
        keepdim = False if keepdim_at is None else call.arg(keepdim_at, "keepdim", False)
        return reducing(call, dim, bool(keepdim), whole=reduced_factors(call, dim))

    return shard


def _sum(call: OpCall) -> Sharding:
    dim = None if call.target is aten.sum.default else call.arg(1, "dim")
    x, out = call.operands[0], call.outs[0]
    # The parts of a pending sum can't be cut to whole numbers before they are added up, nor to a bool.
    cuts = out.dtype == torch.bool or (x.dtype.is_floating_point and not out.dtype.is_floating_point)
    return reducing(call, dim, bool(call.arg(2, "keepdim", False)), linear=() if cuts else sets([x]))


register("sum.default sum.dim_IntList", Rule(_sum, text="... d -> ..."))


def _sum_squares(call: OpCall) -> Sharding:
    x = call.operands[0]
    factors = named(x.shape)
    return Sharding((factors, ()), ((),), sizes_of((factors, x.shape)))


register("fx_feather::sum_squares", Rule(_sum_squares, text="... d, -> "))


def _mean(call: OpCall) -> Sharding:
    whole_call = call.target is aten.mean.default
    dim = None if whole_call else call.arg(1, "dim")
    keepdim = False if whole_call else bool(call.arg(2, "keepdim", False))
    dims = reduced_dims(dim, call.operands[0].ndim)
    count = 1
    for i in dims:
        count *= call.operands[0].shape[i]

    def run(local: Local, operands: list[Tensor]) -> Tensor:
        if not any(local.axes(f"d{i}") for i in dims):
            return local.call.target(*fill(local.call.args, operands), **local.call.kwargs)
        # The parts are added later, and padding counts for nothing: divide by the global size.
        return operands[0].sum(dims, keepdim, dtype=local.call.kwargs.get("dtype")) / count

    return reducing(call, dim, keepdim, linear=sets([call.operands[0]]), run=run)


register("mean.default mean.dim", Rule(_mean, text="... d -> ..."))


def _extremum_nograd(kind: str) -> Callable[[OpCall], Sharding]:
    def run(local: Local, operands: list[Tensor]) -> Tensor:
        x, dim, keepdim = operands[0].detach(), local.call.args[1], local.call.args[2]
        return x.amax(dim, keepdim) if kind == "max" else x.amin(dim, keepdim)

    def shard(call: OpCall) -> Sharding:
        reduced = dict.fromkeys(reduced_factors(call, call.args[1]), kind)
        return reducing(call, call.args[1], call.args[2], reduced=reduced, run=run)

    return shard


register("fx_feather::amax_nograd", Rule(_extremum_nograd("max"), text="... d -> ..., maximum over d"))
register("fx_feather::amin_nograd", Rule(_extremum_nograd("min"), text="... d -> ..., minimum over d"))


def _fill_padding(call: OpCall) -> Sharding:
    dims, value = reduced_dims(call.args[1], call.operands[0].ndim), call.args[2]
    factors = named(call.operands[0].shape)

    def run(local: Local, operands: list[Tensor]) -> Tensor:
        x = operands[0]
        for i in dims:
            n, axes = x.shape[i], local.axes(f"d{i}")
            if not axes or n * local.mesh.count(axes) == local.sharding.sizes[f"d{i}"]:
                continue
            _, true = local.positions(f"d{i}", x.device)
            x = torch.where(true.view(-1, *[1] * (x.ndim - 1 - i)), x, value)
        return x

    return Sharding((factors,), (factors,), sizes_of((factors, call.operands[0].shape)), run=run)


register("fx_feather::fill_padding", Rule(_fill_padding, text="... -> ..."))


def maximum(x: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    """The maximum over dims, without gradient."""
    return torch.ops.fx_feather.amax_nograd(x, list(dims), keepdim)


def minimum(x: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    """The minimum over dims, without gradient."""
    return torch.ops.fx_feather.amin_nograd(x, list(dims), keepdim)


def _extremum(extreme: Callable[..., Tensor], x: Tensor, dim: Dims, keepdim: bool) -> Tensor:
    dims = reduced_dims(dim, x.dim())
    if not dims:
        return x.clone()
    if not x.is_floating_point():
        return extreme(x, dims, keepdim)
    at = extreme(x, dims, True)
    ties = x == at
    # Exactly the extreme value, with a gradient divided evenly among ties, as torch has it.
    share = torch.where(ties & at.isfinite(), x - at, 0.0).sum(dims, True) / ties.sum(dims, True)
    out = at + share
    return out if keepdim else out.squeeze(dims)


def amax(x: Tensor, dim: Dims = (), keepdim: bool = False) -> Tensor:
    """`torch.amax` in operators that may be split."""
    return _extremum(maximum, x, dim, keepdim)


def amin(x: Tensor, dim: Dims = (), keepdim: bool = False) -> Tensor:
    """`torch.amin` in operators that may be split."""
    return _extremum(minimum, x, dim, keepdim)


register("amax.default", Rule(whole_reduction(1, 2), amax, text="... !d -> ..."))
register("amin.default", Rule(whole_reduction(1, 2), amin, text="... !d -> ..."))
register("max.default", Rule(whole_reduction(None, None), amax, text="... !d -> "))
register("min.default", Rule(whole_reduction(None, None), amin, text="... !d -> "))


def _arg_extremum(extreme: Callable[..., Tensor], x: Tensor, dim: int | None, keepdim: bool) -> Tensor:
    dims = reduced_dims(dim, x.dim())
    if not dims:
        return torch.zeros((), dtype=torch.int64, device=x.device)
    at = extreme(x, dims, True)
    n = 1
    for i in dims:
        n *= x.shape[i]
    sizes = [x.shape[i] if i in dims else 1 for i in range(x.dim())]
    index = torch.arange(n, device=x.device).view(sizes)
    # NaN is the extreme of all, and differs from itself.
    hit = (x == at) | (x != x) if x.is_floating_point() else x == at
    return minimum(torch.where(hit, index, n), dims, keepdim)


def argmax(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """`torch.argmax` in operators that may be split: the first of several."""
    return _arg_extremum(maximum, x, dim, keepdim)


def argmin(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """`torch.argmin` in operators that may be split: the first of several."""
    return _arg_extremum(minimum, x, dim, keepdim)


register("argmax.default", Rule(whole_reduction(1, 2), argmax, text="... !d -> ..."))
register("argmin.default", Rule(whole_reduction(1, 2), argmin, text="... !d -> ..."))


def _with_index(arg: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    def decompose(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
        index = arg(x, dim, True)
        values = x.gather(dim, index)
        return (values, index) if keepdim else (values.squeeze(dim), index.squeeze(dim))

    return decompose


register("max.dim", Rule(whole_reduction(1, 2), _with_index(argmax), text="... !d -> ..., ..."))
register("min.dim", Rule(whole_reduction(1, 2), _with_index(argmin), text="... !d -> ..., ..."))


def logsumexp(x: Tensor, dim: Dims, keepdim: bool = False) -> Tensor:
    """`torch.logsumexp` in operators that may be split."""
    dims = reduced_dims(dim, x.dim())
    x = x if x.is_floating_point() else x.to(torch.get_default_dtype())
    top = maximum(x, dims, True)
    top = torch.where(top.isfinite(), top, 0.0)
    # Padding is filled before exp, where an overflow would make its gradient NaN.
    shifted = torch.ops.fx_feather.fill_padding(x - top, list(dims), float("-inf"))
    out = shifted.exp().sum(dims, True).log() + top
    return out if keepdim else out.squeeze(dims)


register("logsumexp.default", Rule(whole_reduction(1, 2), logsumexp, text="... !d -> ..."))


def _along(dim_at: int) -> Callable[[OpCall], Sharding]:
    """Shard function of an operator that keeps the shape and mixes along one dim."""

    def shard(call: OpCall) -> Sharding:
        factors = named(call.operands[0].shape)
        whole = frozenset({f"d{call.dim(dim_at)}"}) if factors else frozenset[str]()
        return Sharding(
            (factors,), tuple(factors for _ in call.outs), sizes_of((factors, call.operands[0].shape)), whole=whole
        )

    return shard


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which torch computes sums of a dtype within one operator."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _shifted(x: Tensor, dim: int) -> Tensor:
    x = x.to(wide(x.dtype))
    return torch.ops.fx_feather.fill_padding(x - maximum(x, [dim], True), [dim], float("-inf"))


def softmax(x: Tensor, dim: int, dtype: Any = None) -> Tensor:
    """`torch.softmax` in operators that may be split."""
    # The private variants have a flag in place of the dtype.
    out = x.dtype if dtype is None or isinstance(dtype, bool) else dtype
    raised = _shifted(x.to(out), dim).exp()
    return (raised / raised.sum(dim, True)).to(out)


def log_softmax(x: Tensor, dim: int, dtype: Any = None) -> Tensor:
    """`torch.log_softmax` in operators that may be split."""
    out = x.dtype if dtype is None or isinstance(dtype, bool) else dtype
    x = x.to(out).to(wide(out))
    shifted = x - maximum(x, [dim], True)
    # Filled for the sum alone: padding of the result stays finite.
    raised = torch.ops.fx_feather.fill_padding(shifted, [dim], float("-inf")).exp()
    return (shifted - raised.sum(dim, True).log()).to(out)


register("softmax.int _softmax.default", Rule(_along(1), softmax, text="... !d -> ... !d"))
register("log_softmax.int _log_softmax.default", Rule(_along(1), log_softmax, text="... !d -> ... !d"))
register("logcumsumexp.default", Rule(_along(1), text="... !d -> ... !d"))
register("cummax.default cummin.default", Rule(_along(1), text="... !d -> ... !d, ... !d"))


def _moments(x: Tensor, dim: Dims, correction: Any, keepdim: bool) -> Tensor:
    dims = reduced_dims(dim, x.dim())
    n = 1
    for i in dims:
        n *= x.shape[i]
    off = x - x.mean(dims, True)
    squares = (off * off.conj()).real if off.is_complex() else off * off
    return squares.sum(dims, keepdim) / max(n - (1 if correction is None else correction), 0)


def var(x: Tensor, dim: Any = None, correction: Any = None, keepdim: bool = False) -> Tensor:
    """`torch.var` in operators that may be split, for each way to pass the correction."""
    if isinstance(dim, bool):
        return _moments(x, None, int(dim), False)
    return _moments(x, dim, int(correction) if isinstance(correction, bool) else correction, keepdim)


def std(x: Tensor, dim: Any = None, correction: Any = None, keepdim: bool = False) -> Tensor:
    """`torch.std` in operators that may be split."""
    return var(x, dim, correction, keepdim).sqrt()


def _var_shard(call: OpCall) -> Sharding:
    dim = None if isinstance(call.arg(1, "dim"), bool) else call.arg(1, "dim")
    keepdim = bool(call.arg(3, "keepdim", False))
    return reducing(call, dim, keepdim, whole=reduced_factors(call, dim))


def _unbiased(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def decompose(x: Tensor, dim: Any = None, unbiased: Any = True, keepdim: bool = False) -> Tensor:
        return f(x, None, int(dim), False) if isinstance(dim, bool) else f(x, dim, int(unbiased), keepdim)

    return decompose


register("var.correction", Rule(_var_shard, var, text="... !d -> ..."))
register("std.correction", Rule(_var_shard, std, text="... !d -> ..."))
register("var.default var.dim", Rule(_var_shard, _unbiased(var), text="... !d -> ..."))
register("std.default std.dim", Rule(_var_shard, _unbiased(std), text="... !d -> ..."))


def _var_mean(x: Tensor, dim: Any = None, correction: Any = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    dims = reduced_dims(dim, x.dim())
    return var(x, dim, correction, keepdim), x.mean(dims, keepdim)


def _std_mean(x: Tensor, dim: Any = None, correction: Any = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return std(x, dim, correction, keepdim), x.mean(reduced_dims(dim, x.dim()), keepdim)


def _both_unbiased(f: Callable[..., Any]) -> Callable[..., Any]:
    def decompose(x: Tensor, dim: Any = None, unbiased: Any = True, keepdim: bool = False) -> tuple[Tensor, Tensor]:
        dim, unbiased = (None, dim) if isinstance(dim, bool) else (dim, unbiased)
        out: tuple[Tensor, Tensor] = f(x, dim, int(unbiased), keepdim)
        return out

    return decompose


for _name, _pair in (("var_mean", _var_mean), ("std_mean", _std_mean)):
    register(f"{_name}.correction", Rule(_var_shard, _pair, text="... !d -> ..., ..."))
    register(f"{_name}.default {_name}.dim", Rule(_var_shard, _both_unbiased(_pair), text="... !d -> ..., ..."))


def _dims_of(x: Tensor, dim: Any) -> list[int]:
    return list(reduced_dims(dim, x.dim()))


def _any(x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    return (x != 0).sum(_dims_of(x, dim), keepdim) != 0


def _all(x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    return (x == 0).sum(_dims_of(x, dim), keepdim) == 0


def _count_nonzero(x: Tensor, dim: Any = None) -> Tensor:
    return (x != 0).sum(_dims_of(x, dim))


register("any.default any.dim any.dims", Rule(whole_reduction(1, 2), _any, text="... !d -> ..."))
register("all.default all.dim all.dims", Rule(whole_reduction(1, 2), _all, text="... !d -> ..."))
register("count_nonzero.default count_nonzero.dim_IntList", Rule(whole_reduction(1, None), _count_nonzero, text="..."))
register("prod.default", Rule(whole_reduction(None, None), text="... !d ->"))
register("prod.dim_int", Rule(whole_reduction(1, 2), text="... !d -> ..."))


def vector_norm(x: Tensor, ord: Any = 2, dim: Dims = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    """`torch.linalg.vector_norm` in operators that may be split."""
    dims = reduced_dims(dim, x.dim())
    x = x if dtype is None else x.to(dtype)
    # A norm is one of absolute values: the square of a complex number is not that of its length.
    x = x.abs() if x.is_complex() else x
    if ord == 0:
        return (x != 0).sum(dims, keepdim).to(x.dtype)
    if ord == float("inf"):
        return amax(x.abs(), dims, keepdim)
    if ord == float("-inf"):
        return amin(x.abs(), dims, keepdim)
    if ord == 1:
        return x.abs().sum(dims, keepdim)
    total = (x * x if ord == 2 else x.abs() ** ord).sum(dims, keepdim)
    # The root has no derivative at 0; the norm has 0 there, as torch has it.
    zero = total == 0
    safe = torch.where(zero, 1.0, total)
    return torch.where(zero, 0.0, safe.sqrt() if ord == 2 else safe ** (1 / ord))


def _norm(x: Tensor, p: Any = 2, dim: Dims = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    return vector_norm(x, 2 if p is None else p, dim, keepdim, dtype)


register("linalg_vector_norm.default", Rule(whole_reduction(2, 3), vector_norm, text="... !d -> ..."))
register("norm.Scalar", Rule(whole_reduction(None, None), _norm, text="... !d ->"))
register("norm.ScalarOpt_dim", Rule(whole_reduction(2, 3), _norm, text="... !d -> ..."))
