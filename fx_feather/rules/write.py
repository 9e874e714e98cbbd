"""Rules of operators that put values in the place of a part of a tensor: what writes to a part become."""

from typing import Any

import torch
from torch import Tensor

from .pointwise import named, sizes_of
from .rule import Factors, OpCall, Rule, Sharding, register

_BOTH = (frozenset({0, 1}),)


def _slice_scatter(call: OpCall) -> Sharding:
    x, source = call.operands
    at, factors = call.dim(2), named(x.shape)
    piece = tuple(("piece",) if i == at else f for i, f in enumerate(factors))
    sizes = sizes_of((factors, x.shape), (piece, source.shape))
    return Sharding((factors, piece), (factors,), sizes, whole=frozenset({f"d{at}", "piece"}), linear=_BOTH)


def _slice_placed(
    x: Tensor, source: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    """The slice of a dim that is split: each row takes its own row of the source, or stays."""
    n, at = x.shape[dim], dim % x.ndim
    first, last, _ = slice(start, end, step).indices(n)
    rows = torch.arange(n, device=x.device)
    taken = (rows >= first) & (rows < last) & ((rows - first) % step == 0)
    of = ((rows - first) // step).clamp(0, max(source.shape[at] - 1, 0))
    spread = source.index_select(at, of) if source.shape[at] else x
    return torch.where(taken.view([n if i == at else 1 for i in range(x.ndim)]), spread, x)


register(
    "slice_scatter.default",
    Rule(_slice_scatter, _slice_placed, text="!d ..., !piece ... -> !d ..."),
)


def _select_scatter(call: OpCall) -> Sharding:
    x = call.operands[0]
    at, factors = call.dim(2), named(x.shape)
    rest = (*factors[:at], *factors[at + 1 :])
    return Sharding(
        (factors, rest), (factors,), sizes_of((factors, x.shape)), whole=frozenset({f"d{at}"}), linear=_BOTH
    )


def _select_placed(x: Tensor, source: Tensor, dim: int, index: int) -> Tensor:
    n, at = x.shape[dim], dim % x.ndim
    taken = torch.arange(n, device=x.device) == index % n
    return torch.where(taken.view([n if i == at else 1 for i in range(x.ndim)]), source.unsqueeze(at), x)


register("select_scatter.default", Rule(_select_scatter, _select_placed, text="!d ..., ... -> !d ..."))


def _diagonal_scatter(call: OpCall) -> Sharding:
    x, source = call.operands
    first, second = call.dim(3, "dim1", 0), call.dim(4, "dim2", 1)
    factors = named(x.shape)
    rest = (*(f for i, f in enumerate(factors) if i not in (first, second)), ("diagonal",))
    sizes = sizes_of((factors, x.shape), (rest, source.shape))
    whole = frozenset({f"d{first}", f"d{second}", "diagonal"})
    return Sharding((factors, rest), (factors,), sizes, whole=whole, linear=_BOTH)


register("diagonal_scatter.default", Rule(_diagonal_scatter, text="!d !e ..., ... !diagonal -> !d !e ..."))


def _index_put(call: OpCall) -> Sharding:
    x, value = call.operands[0], call.operands[-1]
    factors, indices = named(x.shape), call.args[1]
    at = [d for d, index in enumerate(indices) if index is not None]
    if any(indices[d].dtype in (torch.bool, torch.uint8) for d in at):
        own: list[Any] = [tuple((f"{o.index}.{d}",) for d in range(o.ndim)) for o in call.operands]
        own[0] = factors
        every = frozenset(f for dims in own for dim in dims for f in dim)
        shapes = [o.shape for o in call.operands]
        return Sharding(tuple(own), (factors,), sizes_of(*zip(own, shapes, strict=True)), whole=every)
    wide = max(indices[d].ndim for d in at)
    shape = torch.broadcast_shapes(*(indices[d].shape for d in at))
    rows: Factors = tuple((f"row{k}",) for k in range(wide))
    together = at == list(range(at[0], at[-1] + 1))
    start = at[0] if together else 0
    kept = [d for d in range(x.ndim) if d not in at]
    before = [d for d in kept if together and d < start]
    places = [*before, *[None] * wide, *(d for d in kept if d not in before)]
    dims = [rows[places[:i].count(None)] if d is None else factors[d] for i, d in enumerate(places)]
    sizes = [shape[places[:i].count(None)] if d is None else x.shape[d] for i, d in enumerate(places)]

    def broadcast(own: tuple[int, ...], dims: list[Any], sizes: list[int]) -> Factors:
        last = zip(own, dims[len(dims) - len(own) :], sizes[len(sizes) - len(own) :], strict=True)
        return tuple(dim if n == size else () for n, dim, size in last)

    given = tuple(broadcast(o.shape, list(rows), list(shape)) for o in call.operands[1:-1])
    values = broadcast(value.shape, dims, sizes)
    names = sizes_of((factors, x.shape), (rows, tuple(shape)))
    whole = frozenset({f"d{d}" for d in at} | {f for (f,) in rows})
    last = frozenset({0, value.index})
    return Sharding((factors, *given, values), (factors,), names, whole=whole, linear=(last,))


register("index_put.default", Rule(_index_put, text="!v ..., !j, !j ... -> !v ..."))
