"""Rules of operators that take pieces of a dim, move along it or widen it: that dim is whole, and the others pass."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .index import held
from .local import Local
from .pointwise import named, sets, sizes_of
from .rule import Factors, OpCall, Operand, Rule, Sharding, register


def _own_dims(call: OpCall, dims: set[int], result_dims: Callable[[Factors, Operand], Factors]) -> Sharding:
    """A call in which `dims` of the operand stay whole and the others pass."""
    x = call.operands[0]
    factors = named(x.shape)
    results = tuple(result_dims(factors, o) for o in call.outs)
    sizes = sizes_of((factors, x.shape), *((r, o.shape) for r, o in zip(results, call.outs, strict=True)))
    return Sharding((factors,), results, sizes, whole=frozenset(f"d{i}" for i in dims), linear=sets([x]))


def _cut(dim_at: int) -> Callable[[OpCall], Sharding]:
    """Shard function of an operator that gives pieces along one dim."""

    def shard(call: OpCall) -> Sharding:
        at = call.dim(dim_at)

        def pieces(factors: Factors, out: Operand) -> Factors:
            return (*factors[:at], (), *factors[at + 1 :])

        return _own_dims(call, {at}, pieces)

    return shard


#: A rank that has a part of a dim of several pieces end to end has no part of each piece.
PIECES = (
    'keep the pieces of a fused weight in a dim of their own, as in ff.Param("embed _ mlp", (d, 2, m)), '
    'gate, up = torch.einsum("...d,dpm->...pm", x, w).unbind(-2): each is then split, and nothing is sent'
)
_CUT = Rule(_cut(2), text="!d -> pieces", advice=PIECES)
register("split.Tensor split.sizes split_with_sizes.default chunk.default", _CUT)
register("tensor_split.sections tensor_split.indices", _CUT)


def _narrow(call: OpCall) -> Sharding:
    at = call.dim(1)
    if call.outs[0].shape == call.operands[0].shape:
        # The full range in whole numbers would be too long for a part.
        identity = _own_dims(call, set(), lambda f, o: f)
        return dataclasses.replace(identity, run=lambda local, operands: torch.ops.aten.alias.default(operands[0]))
    return _own_dims(call, {at}, lambda f, o: (*f[:at], (), *f[at + 1 :]))


register("slice.Tensor narrow.default narrow_copy.default", Rule(_narrow, text="!d -> piece"))


def _dropping(places: Callable[[OpCall, int], list[int]], several: bool) -> Callable[[OpCall], Sharding]:
    """Shard function of an operator that gives places of one dim, without that dim.

    Of a split dim the rank that holds a place gives it, and others give zeros: a pending sum.
    """

    def shard(call: OpCall) -> Sharding:
        at, x = call.dim(1), call.operands[0]
        plain = _own_dims(call, {at}, lambda f, o: (*f[:at], *f[at + 1 :]))
        if x.dtype == torch.bool:  # which has no sums
            return plain

        def pick(local: Local, operands: list[Tensor]) -> Any:
            index = torch.tensor(places(call, x.shape[at]), device=operands[0].device)
            rows, inside = held(local, f"d{at}", index)
            inside = inside.view([-1 if i == at else 1 for i in range(x.ndim)])
            picked = torch.where(inside, operands[0].index_select(at, rows), 0)
            return list(picked.unbind(at)) if several else picked.squeeze(at)

        return dataclasses.replace(plain, whole=frozenset(), lower={f"d{at}": pick})

    return shard


register("select.int", Rule(_dropping(lambda call, n: [call.arg(2, "index") % n], False), text="d ... -> ..."))
register("unbind.int", Rule(_dropping(lambda call, n: list(range(n)), True), text="d ... -> ..."))


def _mixing(dims_at: int) -> Callable[[OpCall], Sharding]:
    """Shard function of an operator that moves elements within the dims that it names."""

    def shard(call: OpCall) -> Sharding:
        n = call.operands[0].ndim
        dims = call.arg(dims_at, "dims", ())
        many = [dims] if isinstance(dims, int) else list(dims)
        return _own_dims(call, {d % n for d in many} if many else set(range(n)), lambda f, o: f)

    return shard


def _padded(call: OpCall) -> Sharding:
    pad, n = call.args[1], call.operands[0].ndim
    # Widths come in pairs, for the last dim first.
    dims = {n - 1 - k // 2 for k, width in enumerate(pad) if width}
    s = _own_dims(call, dims, lambda f, o: tuple(() if i in dims else d for i, d in enumerate(f)))
    # `pad` has a mode before the value.
    value = call.args[-1] if len(call.args) > 2 else call.kwargs.get("value")
    constant = isinstance(value, (int, float)) and value != 0
    # A constant other than 0 would be added once a rank.
    return dataclasses.replace(s, linear=() if constant else s.linear)


register("pad.default constant_pad_nd.default", Rule(_padded, text="!d -> wider"))


def _glu(call: OpCall) -> Sharding:
    at = call.dim(1, default=-1)
    return dataclasses.replace(_own_dims(call, {at}, lambda f, o: (*f[:at], (), *f[at + 1 :])), linear=())


register("glu.default", Rule(_glu, text="!d -> half", advice=PIECES))
register("flip.default", Rule(_mixing(1), text="!d -> !d"))
register("roll.default", Rule(_mixing(2), text="!d -> !d"))


def _last_two(call: OpCall) -> Sharding:
    n = call.operands[0].ndim
    return _own_dims(call, {n - 2, n - 1}, lambda f, o: f)


register("tril.default triu.default", Rule(_last_two, text="... !d !d -> ... !d !d"))


def _diagonal(call: OpCall) -> Sharding:
    one, two = call.dim(2, "dim1", 0), call.dim(3, "dim2", 1)
    return _own_dims(call, {one, two}, lambda f, o: (*(d for i, d in enumerate(f) if i not in (one, two)), ()))


register("diagonal.default", Rule(_diagonal, text="!d !e ... -> ... n"))


def _complex_view(call: OpCall) -> Sharding:
    last = call.operands[0].ndim - 1
    if call.target is torch.ops.aten.view_as_complex.default:
        return _own_dims(call, {last}, lambda f, o: f[:-1])
    return _own_dims(call, set(), lambda f, o: (*f, ()))


register("view_as_complex.default view_as_real.default", Rule(_complex_view, text="... !2 -> ..."))
