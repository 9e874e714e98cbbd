"""Reach: which values need a cotangent, which get one, and of what type the gradient of a parameter is meanwhile."""

from collections.abc import Sequence
from typing import NoReturn

import torch

from ..errors import FeatherError, ShapeError, fail
from ..layout import ParamTypes
from ..pure import takes_gradient
from ..source import UNKNOWN, user_line
from ..spec import Type
from ..unit import GlobalProgram, Unit


def needs_gradient(program: GlobalProgram, roots: set[int]) -> dict[int, bool]:
    """Which global values depend on `roots` through values that have gradients."""
    needs = {g: g in roots for g in program.inputs}
    known: dict[tuple[int, tuple[bool, ...]], list[bool]] = {}
    for call in (row for c in program.calls for row in c.split()):
        key = (call.unit, tuple([needs[a] for a in call.args]))
        if key not in known:  # layers share their unit
            known[key] = _reached_outputs(program.units[call.unit], key[1])
        needs.update(zip(call.outs, known[key], strict=True))
    return needs


def check_reached(program: GlobalProgram, needs: dict[int, bool]) -> None:
    """Raises an error if no gradient comes from the loss of a program, or if one would come from its count."""
    loss, count = program.outputs[:2]
    if needs[count]:
        _refuse_count()
    if not needs[loss] and any(needs[g] for g in program.inputs):
        fail(
            FeatherError,
            call=f"loss_fn(params, batch) -> (sum, count), whose sum is made at {_made_at(program, loss)}",
            got="a sum that no parameter reaches",
            number="every gradient would be 0",
            rule="the gradient is that of the sum by the parameters",
            fix="take out the detach(), torch.no_grad() or whole numbers between the parameters and the sum",
        )


def _made_at(program: GlobalProgram, value: int) -> str:
    for call in (row for c in program.calls for row in c.split()):
        if value in call.outs:
            return user_line(program.units[call.unit].outputs[call.outs.index(value)])
    return UNKNOWN


def _refuse_count() -> NoReturn:
    fail(
        ShapeError,
        call="loss_fn(params, batch) -> (sum, count)",
        got="a count that depends on the parameters",
        number="its gradient would be lost: sum and count are added up over ranks and microbatches before one divides",
        rule="the gradient is that of the sum, divided by the count of the whole batch, which is a constant",
        fix="return total, count.detach() if the count is only to normalise, or a sum of quotients of its own: "
        "return (total / count) * batch_size, batch_size",
    )


def _reached_outputs(unit: Unit, needs: Sequence[bool]) -> list[bool]:
    """Which outputs of a unit depend on those of its inputs that need a cotangent."""
    reached = dict(zip(unit.inputs, needs, strict=True))
    for n in unit.graph.nodes:
        if n.op == "call_function":
            val = n.meta["val"]
            results = val if isinstance(val, (list, tuple)) else [val]
            floats = any(v is not None and takes_gradient(v) for v in results)
            stops = n.target is torch.ops.aten.detach.default
            reached[n] = floats and not stops and any(reached.get(a, False) for a in n.all_input_nodes)
    return [reached.get(n, False) for n in unit.outputs]


def reached_by_cotangents(program: GlobalProgram, needs: dict[int, bool], seeds: set[int]) -> set[int]:
    """The global values that get a cotangent when `seeds` have one."""
    reached = set(seeds)
    for call in reversed([row for c in program.calls for row in c.split()]):
        if any(o in reached for o in call.outs):
            reached.update(a for a in call.args if needs.get(a))
    return reached


def gradient_type(use: Type, types: ParamTypes, dtype: torch.dtype, partial: frozenset[str]) -> Type:
    """The type in which the gradient of a parameter is accumulated over microbatches.

    It is split as `store.grads` says; over the other axes on which it is still owed, it stays a pending sum, so that
    it is reduced once a step and not once a microbatch.
    """
    split = types.grads.sharded
    return use.with_(dtype=dtype, dims=types.grads.dims, partial=partial - split, replicated=frozenset())
