"""Rules of pointwise operators: factors from broadcasting, and the table of those that are linear."""

from collections.abc import Callable
from typing import Any

import torch

from .. import kernels as kernels  # defines the operators that are named below
from .local import Local, fill
from .rule import Factors, OpCall, Operand, Rule, Sharding, overloads, register

Sets = tuple[frozenset[int], ...]
Linear = Callable[[OpCall], Sets]


def sets(*groups: list[Operand]) -> Sets:
    """Sets of operands in which an operator is linear jointly."""
    return tuple(frozenset(o.index for o in group) for group in groups if group)


def aligned(shape: tuple[int, ...], result: tuple[int, ...]) -> Factors:
    """The factors of an operand that broadcasts to `result`, whose dims are factors d0, d1, ..."""
    lead = len(result) - len(shape)
    # A dim of size 1 in the result too is one that a stored parameter of any size may split.
    return tuple((f"d{lead + i}",) if n == result[lead + i] else () for i, n in enumerate(shape))


def named(shape: tuple[int, ...]) -> Factors:
    """The factors d0, d1, ... of a result, one a dim."""
    return tuple((f"d{i}",) for i in range(len(shape)))


def sizes_of(*pairs: tuple[Factors, tuple[int, ...]]) -> dict[str, int]:
    """The size of each factor that makes up a dim alone."""
    return {dim[0]: n for factors, shape in pairs for dim, n in zip(factors, shape, strict=True) if len(dim) == 1}


def broadcast(call: OpCall, linear: Sets = (), ignored: frozenset[int] = frozenset(), **more: Any) -> Sharding:
    """The factors of a call whose operands all broadcast to its results."""
    shape = call.outs[0].shape
    operands = tuple(
        ((),) * o.ndim if o.index in ignored and o.ndim > len(shape) else aligned(o.shape, shape) for o in call.operands
    )
    results = tuple(named(o.shape) for o in call.outs)
    return Sharding(operands, results, sizes_of((results[0], shape)), linear=linear, ignored=ignored, **more)


def tensors(call: OpCall, *indices: int) -> list[Operand]:
    """Those of the arguments at these positions that are tensors."""
    return [call.args[i] for i in indices if i < len(call.args) and isinstance(call.args[i], Operand)]


def _sum(call: OpCall) -> Sets:
    # A Python scalar among the terms would be added once a rank.
    terms = tensors(call, 0, 1)
    return sets(terms) if len(terms) == 2 else ()


def _product(call: OpCall) -> Sets:
    return sets(*([t] for t in tensors(call, 0, 1)))


def _numerator(call: OpCall) -> Sets:
    return () if call.kwargs.get("rounding_mode") else sets(tensors(call, 0))


def _first(call: OpCall) -> Sets:
    return sets(tensors(call, 0))


def _cast(call: OpCall) -> Sets:
    before, after = call.operands[0].dtype, call.outs[0].dtype
    exact = before == after or after.is_complex or (after.is_floating_point and not before.is_complex)
    return sets([call.operands[0]]) if exact else ()


def _where(call: OpCall) -> Sets:
    values = call.args[1:3]
    if all(isinstance(v, Operand) for v in values):
        return sets(list(values))
    # A constant other than 0 would be added once a rank.
    if any(not isinstance(v, Operand) and v != 0 for v in values):
        return ()
    return sets([v for v in values if isinstance(v, Operand)])


def _masked_fill(call: OpCall) -> Sets:
    value = call.arg(2, "value")
    if isinstance(value, Operand):
        return sets([call.operands[0], value])
    return sets([call.operands[0]]) if value == 0 else ()


def _lerp(call: OpCall) -> Sets:
    return sets(tensors(call, 0, 1))


def _fused_product(call: OpCall) -> Sets:
    return sets(tensors(call, 0, 1), tensors(call, 0, 2))


LINEAR: dict[str, Linear] = {
    "add": _sum,
    "sub": _sum,
    "rsub": _sum,
    "subtract": _sum,
    "mul": _product,
    "multiply": _product,
    "div": _numerator,
    "divide": _numerator,
    "true_divide": _numerator,
    "neg": _first,
    "negative": _first,
    "positive": _first,
    "real": _first,
    "conj": _first,
    "_conj": _first,
    "clone": _first,
    "alias": _first,
    "detach": _first,
    "contiguous": _first,
    "lift_fresh": _first,
    "lift_fresh_copy": _first,
    "to": _cast,
    "_to_copy": _cast,
    "type_as": _cast,
    "where": _where,
    "masked_fill": _masked_fill,
    "lerp": _lerp,
    "addcmul": _fused_product,
    "addcdiv": _lerp,
    "dropout": _first,
}


def _nonlinear(call: OpCall) -> Sets:
    return ()


def linearity(op: Any) -> Linear:
    """How an operator is linear, by its name; not at all where nothing is known."""
    return LINEAR.get(op._schema.name.rpartition("::")[2], _nonlinear)


#: Linear in some operand, and yet not finite at every value of another.
SINGULAR = frozenset({"div", "divide", "true_divide", "addcdiv"})


def padding_harmless(local: Local, operands: list[torch.Tensor]) -> Any:
    """The local call, with padding on which it is finite and smooth."""
    # The cotangent of padding is 0, but 0 times an infinite derivative is NaN, which a later sum would spread:
    # 1/x, log, sqrt at 0, exp of anything. Every function in use is finite and smooth at 1/2.
    call = local.call
    safe = [local.filled(i, x, 0.5) if x.is_floating_point() else x for i, x in enumerate(operands)]
    return call.target(*fill(call.args, safe), **fill(dict(call.kwargs), safe))


def pointwise(op: Any) -> Rule:
    """The rule of a pointwise operator."""
    linear, name = linearity(op), op._schema.name.rpartition("::")[2]
    run = padding_harmless if name not in LINEAR or name in SINGULAR else None
    return Rule(lambda call: broadcast(call, linear(call), run=run), text="from broadcasting")


def is_pointwise(op: Any) -> bool:
    """Whether torch says that an operator is pointwise, and it has no effects and is not random."""
    return (
        isinstance(op, torch._ops.OpOverload)
        and torch.Tag.pointwise in op.tags
        and torch.Tag.nondeterministic_seeded not in op.tags
        and not op._schema.is_mutable
    )


def of_tensors(name: str) -> list[Any]:
    """The functional overloads of an operator that take a tensor."""
    found = []
    for op in overloads(name):
        schema = op._schema
        if schema.is_mutable or not any("Tensor" in str(a.type) for a in schema.arguments):
            continue
        if all(str(r.type) == "Tensor" for r in schema.returns):
            found.append(op)
    return found


# Pointwise, though torch does not tag every overload of them.
UNTAGGED = """
    alias detach contiguous _to_copy where masked_fill negative real conj hardswish log_sigmoid polar complex isclose
    lift_fresh lift_fresh_copy multiply divide subtract true_divide greater less not_equal greater_equal less_equal
    absolute __and__ __or__ __xor__ rsub fill floor_divide
"""
for _name in UNTAGGED.split():
    for _op in of_tensors(_name):
        register(str(_op).removeprefix("aten."), pointwise(_op))

for _name in ("scheduled", "finite"):
    register(f"fx_feather::{_name}", Rule(broadcast, text="of one number"))


def _cast_like(call: OpCall) -> Sharding:
    # The second operand gives its dtype only, so that its shape need not fit.
    ignored = frozenset(o.index for o in call.operands[1:])
    shape = call.outs[0].shape
    factors = named(shape)
    operands = (factors, *(((),) * o.ndim for o in call.operands[1:]))
    return Sharding(operands, (factors,), sizes_of((factors, shape)), linear=_cast(call), ignored=ignored)


register("to.dtype to.device to.dtype_layout to.other type_as", Rule(_cast_like, text="... -> ..."))


def _filled_like(value: float | None) -> Callable[[OpCall], Sharding]:
    def run(local: Local, operands: list[torch.Tensor]) -> torch.Tensor:
        given = local.call.arg(1, "fill_value") if value is None else value
        out = local.results[0]
        return torch.full(out.local_shape(local.mesh), given, dtype=out.dtype, device=operands[0].device)

    def shard(call: OpCall) -> Sharding:
        return broadcast(call, ignored=frozenset({0}), run=run)

    return shard


register("zeros_like empty_like", Rule(_filled_like(0), text="... -> ..."))
register("ones_like", Rule(_filled_like(1), text="... -> ..."))
register("full_like", Rule(_filled_like(None), text="... -> ..."))


# One that drops anything is a product with a draw by then.
register("dropout", Rule(lambda call: broadcast(call, sets([call.operands[0]])), text="... -> ..."))


def _broadcast_all(call: OpCall) -> Sharding:
    return broadcast(call, sets(list(call.operands)))


register("broadcast_tensors", Rule(_broadcast_all, text="from broadcasting"))


# A whole step of an optimizer, element by element; see `kernels`.
register("fx_feather::adamw", Rule(broadcast, text="..., ..., , ..., ..., , -> ..., ..., ..., ..."))
