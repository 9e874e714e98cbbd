"""Rules of operators that act on some dims and are a batch over the others: the dims acted on stay whole."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from .index import _index_add, _scatter
from .pointwise import named, padding_harmless, sets, sizes_of
from .reduce import amax, amin, reduced_dims, reduced_factors, reducing, vector_norm
from .rule import Dim, Factors, OpCall, Operand, Rule, Sharding, register

Shard = Callable[[OpCall], Sharding]


def acting(dims: Callable[[OpCall], Iterable[int]], *, linear: bool = False) -> Shard:
    """Shard function of an operator of one tensor that acts on `dims` of it: the others are a batch, in their order.

    Dims acted on keep their places in the results, and what the results have more comes last.
    """

    def shard(call: OpCall) -> Sharding:
        x = call.operands[0]
        acted = {d % max(x.ndim, 1) for d in dims(call)}
        factors = named(x.shape)
        results = []
        for o in call.outs:
            kept: list[Dim] = [() if i in acted else f for i, f in enumerate(factors)]
            results.append((*kept, *((),) * (o.ndim - x.ndim)))
        return Sharding(
            (factors, *(((),) * o.ndim for o in call.operands[1:])),
            tuple(results),
            sizes_of((factors, x.shape)),
            whole=frozenset(f"d{i}" for i in acted if i < x.ndim),
            linear=sets([x]) if linear else (),
            run=None if linear else padding_harmless,
        )

    return shard


def last(k: int, *, linear: bool = False) -> Shard:
    """Shard function of an operator that acts on the last `k` dims."""
    return acting(lambda call: range(-k, 0), linear=linear)


def along(at: int, default: int = -1, *, linear: bool = False) -> Shard:
    """Shard function of an operator that acts along the one dim given as argument `at`."""
    return acting(lambda call: [call.arg(at, "dim", default)], linear=linear)


def all_whole(call: OpCall) -> Sharding:
    """The factors of a call that acts on every dim of its operands: what is split takes the decomposition."""
    operands = tuple(tuple((f"x{o.index}_{i}",) for i in range(o.ndim)) for o in call.operands)
    sizes = sizes_of(*((f, o.shape) for f, o in zip(operands, call.operands, strict=True)))
    return Sharding(operands, tuple(((),) * o.ndim for o in call.outs), sizes, whole=frozenset(sizes))


register("diff.default", Rule(along(2), text="... !d -> ..."))


def _windows(call: OpCall) -> list[int]:
    return [call.args[1]]


register("unfold.default", Rule(acting(_windows, linear=True), text="... !d -> ... d w"))
register("fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft", Rule(along(2), text="... !d -> ..."))


def _planes(default: tuple[int, ...] | None) -> Callable[[OpCall], Iterable[int]]:
    def dims(call: OpCall) -> Iterable[int]:
        given = call.arg(2, "dim", default)
        if given is None:
            sizes = call.arg(1, "s")
            given = range(call.operands[0].ndim) if sizes is None else range(-len(sizes), 0)
        return given

    return dims


register("fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2", Rule(acting(_planes((-2, -1))), text="... !d !e -> ..."))
register("fft_fftn fft_ifftn fft_rfftn fft_irfftn", Rule(acting(_planes(None)), text="... !d -> ..."))


def _reduction(dim_at: int, keepdim_at: int) -> Shard:
    def shard(call: OpCall) -> Sharding:
        dim = call.arg(dim_at, "dim")
        return reducing(call, dim, bool(call.arg(keepdim_at, "keepdim", False)), whole=reduced_factors(call, dim))

    return shard


def _nansum(x: Tensor, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    return torch.where(x != x, 0.0, x).sum(list(reduced_dims(dim, x.dim())), keepdim, dtype=dtype)


def _nanmean(x: Tensor, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    count = (x == x).sum(list(reduced_dims(dim, x.dim())), keepdim)
    return _nansum(x, dim, keepdim, dtype) / count


def _aminmax(x: Tensor, dim: Any = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return amin(x, dim, keepdim), amax(x, dim, keepdim)


register("nansum.default", Rule(_reduction(1, 2), _nansum, text="... !d -> ..."))
register("nanmean.default", Rule(_reduction(1, 2), _nanmean, text="... !d -> ..."))
register("aminmax.default", Rule(_reduction(1, 2), _aminmax, text="... !d -> ..., ..."))
register("median.dim nanmedian.dim mode.default", Rule(_reduction(1, 2), text="... !d -> ..., ..."))
register("median.default nanmedian.default", Rule(_reduction(9, 9), text="... !d ->"))
register("quantile.scalar nanquantile.scalar", Rule(_reduction(2, 3), text="... !d -> ..."))


def _similarity(call: OpCall) -> Sharding:
    a, b = call.operands
    shape = torch.broadcast_shapes(a.shape, b.shape)
    at = call.arg(2, "dim", 1) % max(len(shape), 1)
    return _pairwise(call, tuple(shape), at, False)


def _pairwise(call: OpCall, shape: tuple[int, ...], at: int, keepdim: bool) -> Sharding:
    factors = named(shape)
    operands = tuple(
        tuple(
            f if n == m else ()
            for f, n, m in zip(factors[len(shape) - o.ndim :], o.shape, shape[-o.ndim :] if o.ndim else (), strict=True)
        )
        for o in call.operands
    )
    out: Factors = tuple(() if i == at else f for i, f in enumerate(factors) if keepdim or i != at)
    return Sharding(
        operands,
        (out,),
        sizes_of((factors, shape)),
        whole=frozenset({f"d{at}"}) if shape else frozenset(),
        run=padding_harmless,
    )


def cosine_similarity(a: Tensor, b: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """`torch.cosine_similarity` in operators that may be split."""
    a, b = torch.broadcast_tensors(a, b)

    def unit(x: Tensor) -> Tensor:
        norm = vector_norm(x, 2, dim, True)
        # As torch has it: no gradient flows through what is cut off below.
        return x / (norm + (norm.clamp_min(eps) - norm).detach())

    return (unit(a) * unit(b)).sum(dim)


def _distance(call: OpCall) -> Sharding:
    shape = tuple(torch.broadcast_shapes(*(o.shape for o in call.operands)))
    return _pairwise(call, shape, len(shape) - 1, bool(call.arg(4, "keepdim", False)))


def _pairwise_distance(a: Tensor, b: Tensor, p: float = 2, eps: float = 1e-6, keepdim: bool = False) -> Tensor:
    return vector_norm(a - b + eps, p, -1, keepdim)


register("cosine_similarity.default", Rule(_similarity, cosine_similarity, text="... !d, ... !d -> ..."))
register("pairwise_distance.default", Rule(_distance, _pairwise_distance, text="... !d, ... !d -> ..."))


def _cdist(call: OpCall) -> Sharding:
    a, b = call.operands
    out = call.outs[0].shape
    lead = named(out[:-2])

    def of(o: Operand, row: str) -> Factors:
        own = lead[len(lead) - (o.ndim - 2) :] if o.ndim > 2 else ()
        shared = out[len(out) - o.ndim : -2]
        batch = tuple(f if n == m else () for f, n, m in zip(own, o.shape[:-2], shared, strict=True))
        return (*batch, (row,), ("k",))

    sizes = {**sizes_of((lead, out[:-2])), "m": a.shape[-2], "n": b.shape[-2], "k": a.shape[-1]}
    return Sharding(
        (of(a, "m"), of(b, "n")), ((*lead, ("m",), ("n",)),), sizes, whole=frozenset({"k"}), run=padding_harmless
    )


def cdist(a: Tensor, b: Tensor, p: float = 2, compute_mode: Any = None) -> Tensor:
    """`torch.cdist` in operators that may be split."""
    return vector_norm(a.unsqueeze(-2) - b.unsqueeze(-3), p, -1)


register("cdist.default", Rule(_cdist, cdist, text="... m !k, ... n !k -> ... m n"))


def _sorted_into(values: int) -> Shard:
    """Shard function of a search in an ascending row; the position of the searched values among the operands."""

    def shard(call: OpCall) -> Sharding:
        x, row = call.operands[values], call.operands[1 - values]
        if len(call.operands) != 2 or row.ndim != 1:
            return all_whole(call)
        factors = named(x.shape)
        both: tuple[Factors, Factors] = (factors, (("r",),))
        sizes = {**sizes_of((factors, x.shape)), "r": row.shape[0]}
        return Sharding(both if values == 0 else both[::-1], (factors,), sizes, whole=frozenset({"r"}))

    return shard


register("bucketize.Tensor", Rule(_sorted_into(0), text="..., !r -> ..."))
register("searchsorted.Tensor", Rule(_sorted_into(1), text="!r, ... -> ..."))


def _take(call: OpCall) -> Sharding:
    x, index = call.operands
    of_x = tuple((f"x{i}",) for i in range(x.ndim))
    of_index = named(index.shape)
    sizes = sizes_of((of_x, x.shape), (of_index, index.shape))
    return Sharding((of_x, of_index), (of_index,), sizes, whole=frozenset(f for (f,) in of_x), linear=sets([x]))


register("take.default", Rule(_take, text="!..., j -> j"))


def _without_sums(shard: Shard) -> Shard:
    return lambda call: dataclasses.replace(shard(call), linear=())


register("scatter_reduce.two", Rule(_without_sums(_scatter(True)), text="!v ..., !j ..., !j ... -> !v ..."))
register("index_copy.default", Rule(_without_sums(_index_add), text="!v ..., !j, !j ... -> !v ..."))


def _index_fill(call: OpCall) -> Sharding:
    x, index, *value = call.operands
    factors = named(x.shape)
    of_index: Factors = (("j",),) * index.ndim
    sizes = {**sizes_of((factors, x.shape)), **({"j": index.shape[0]} if index.ndim else {})}
    whole = frozenset({f"d{call.dim(1)}", "j"} & set(sizes))
    return Sharding((factors, of_index, *(() for _ in value)), (factors,), sizes, whole=whole)


register("index_fill.int_Scalar index_fill.int_Tensor", Rule(_index_fill, text="!v ..., !j -> !v ..."))


def _stacked(at: int) -> Shard:
    """Shard function of an operator that joins tensors along dim `at`, where each has it."""

    def shard(call: OpCall) -> Sharding:
        if any(o.ndim < 2 for o in call.operands):
            return all_whole(call)
        factors = named(call.outs[0].shape)
        operands = tuple(
            tuple((f"j{o.index}",) if i == at else f for i, f in enumerate(factors)) for o in call.operands
        )
        sizes = sizes_of(*((f, o.shape) for f, o in zip(operands, call.operands, strict=True)))
        out = tuple(() if i == at else f for i, f in enumerate(factors))
        whole = frozenset(f"j{o.index}" for o in call.operands)
        return Sharding(operands, (out,), sizes, whole=whole, linear=sets(list(call.operands)))

    return shard


def _meshgrid(tensors: list[Tensor], indexing: str = "ij") -> tuple[Tensor, ...]:
    swap = indexing == "xy" and len(tensors) > 1
    order = [1, 0, *range(2, len(tensors))] if swap else list(range(len(tensors)))
    shape = [tensors[k].numel() for k in order]
    return tuple(x.reshape([-1 if k == i else 1 for k in order]).expand(shape) for i, x in enumerate(tensors))


register("hstack.default", Rule(_stacked(1), text="... !a, ... !b -> ..."))
register("vstack.default", Rule(_stacked(0), text="!a ..., !b ... -> ..."))
register("kron.default", Rule(all_whole, text="!..., !... -> ..."))
register("meshgrid.default meshgrid.indexing", Rule(all_whole, _meshgrid, text="!a, !b -> a b, a b"))
