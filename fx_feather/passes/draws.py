"""Draws: which part of the whole each microbatch draws, and each rank."""

import dataclasses
from typing import Any

import torch
from torch import fx

from ..errors import FeatherError, fail
from ..layout import Layout
from ..mesh import Mesh
from ..source import user_line
from ..spec import Type
from ..unit import GlobalProgram, Unit
from .plan import OpStep, Plan, Root, SubStep
from .propagate import propagate

_DRAW = torch.ops.fx_feather.draw.default
_LIKE, _BATCH, _PARTS = 2, 11, 12
_AXIS = "batch"


def draws_of(unit: Unit) -> list[fx.Node]:
    """The draws of a unit, in order."""
    return [n for n in unit.graph.nodes if n.target is _DRAW]


def first_draw(program: GlobalProgram) -> str | None:
    """The user's line of the first draw that has no key of its own, if there is one."""
    return next((user_line(n) for u in program.units for n in draws_of(u) if n.args[1] is None), None)


def place_draws(program: GlobalProgram, params: list[Type], batch: list[Type], parts: int) -> None:
    """Tells each draw along which dim the microbatches of a batch are its parts, if along any.

    The dim is the one that a layout would split which splits the batch over one more axis. What does not depend on the
    batch is the same in all microbatches.

    Args:
        program: whose draws are told, in place.
        params: types of the parameters.
        batch: types of the leaves of a microbatch, with names.
        parts: microbatches of a batch.

    Raises:
        FeatherError: a draw whose dim of the batch is not known.
    """
    if parts == 1 or not program.drawn:
        return
    mesh, layout = Mesh(**{_AXIS: 1}), Layout(compute={"batch": _AXIS})
    data = [Type(t.dtype, t.shape, layout.value_dims(t.names or ()), names=t.names) for t in batch]
    whole = [Type(t.dtype, t.shape, ((),) * len(t.shape), names=t.names) for t in params]
    keys = [Type(torch.int64, (2,), ((),))] * len(program.drawn)
    types = dict(zip(program.inputs, [*whole, *data, *keys], strict=True))
    reached = {g: bool(t.sharded) for g, t in types.items()}
    found: dict[fx.Node, int] = {}
    plans: dict[Any, Plan] = {}
    for call in (row for c in program.calls for row in c.split()):
        unit = program.units[call.unit]
        given = [types[a] for a in call.args]
        key = (call.unit, *given)
        if key not in plans:
            plans[key] = _followed(unit, given, mesh, layout, parts)
        plan = plans[key]
        types.update(zip(call.outs, plan.out_types, strict=True))
        inside = _reached(unit, [reached[a] for a in call.args])
        reached.update(zip(call.outs, (inside[n] for n in unit.outputs), strict=True))
        for n in draws_of(unit):
            at = _dim(n, plan, layout, inside)
            if found.setdefault(n, at) != at:
                _refuse(n, f"dim {found[n]} of one call of {unit.name}, and dim {at} of another, is that of the batch")
    for n, at in found.items():
        n.update_arg(_BATCH, at)
        n.update_arg(_PARTS, parts if at >= 0 else 1)


def split_draws(plan: Plan) -> None:
    """Lets a draw by a shape alone be split as all of its uses take it: each rank then draws no more than that."""
    for n, step in plan.steps.items():
        if n.target is not _DRAW or n.args[_LIKE] is not None:
            continue
        assert isinstance(step, OpStep)
        wanted = _uses(plan, (n, 0))
        dims = {t.dims for t in wanted}
        if len(dims) != 1 or not wanted[0].sharded or any(t.partial for t in wanted):
            continue
        (split,) = dims
        axes = {f"d{d}": own for d, own in enumerate(split) if own}
        step.solution = dataclasses.replace(step.solution, factor_axes=axes)
        varying = wanted[0].sharded
        step.operands = [(r, t.with_(replicated=t.replicated | varying)) for r, t in step.operands]
        step.results = tuple(t.with_(dims=split, replicated=t.replicated - varying) for t in step.results)
        plan.types[n, 0] = step.results[0]


def _uses(plan: Plan, root: Root) -> list[Type]:
    """The types that a value is converted to."""
    found = [t for r, t in plan.outputs if r == root]
    for step in plan.steps.values():
        if isinstance(step, SubStep):
            found += [plan.types[root] for r in step.operands if r == root]
        else:
            found += [t for r, t in step.operands if r == root]
    return found


def _followed(unit: Unit, given: list[Type], mesh: Mesh, layout: Layout, parts: int) -> Plan:
    try:
        return propagate(unit, given, mesh, layout)
    except FeatherError as e:
        fail(
            FeatherError,
            call=f"compile_step(..., accumulate={parts}) of a loss that draws random numbers",
            got=str(e).replace(f" on {mesh!r}", ""),
            number="which dim is that of the batch can't be followed through this operator",
            rule="microbatches draw what the whole batch would draw, each its own rows, for any accumulate=",
            fix="accumulate=1, or what mends the message above for a layout that splits the batch",
        )


def _reached(unit: Unit, given: list[bool]) -> dict[fx.Node, bool]:
    """Which values of a unit depend on the batch."""
    out = dict(zip(unit.inputs, given, strict=True))
    for n in unit.graph.nodes:
        if n.op != "placeholder":
            out[n] = any(out[a] for a in n.all_input_nodes)
    return out


def _dim(n: fx.Node, plan: Plan, layout: Layout, reached: dict[fx.Node, bool]) -> int:
    step = plan.steps[n]
    assert not isinstance(step, SubStep)
    constrained = [u for u in n.users if u.target is torch.ops.fx_feather.constrain.default]
    dims = plan.types[n, 0].dims
    if constrained:
        dims = layout.value_dims(tuple(constrained[0].args[1].split()))
    at = next((d for d, axes in enumerate(dims) if axes), -1)
    like = n.args[_LIKE]
    if at < 0 and not constrained and (like is None or reached[like]):
        _refuse(n, "which of its dims is that of the batch is not known")
    return at


def _refuse(n: fx.Node, number: str) -> None:
    shape = list(n.meta["val"].shape)
    names = " ".join(["batch", *["_"] * len(shape)][: len(shape)])
    fail(
        FeatherError,
        call=f"a draw of random numbers at {user_line(n)}",
        got=f"numbers of shape {shape} for each microbatch",
        number=number,
        rule="microbatches draw what the whole batch would draw, each its own rows, for any accumulate=",
        fix=f"draw by a tensor that has the batch as a dim (torch.rand_like(x), F.dropout(x)), or name the dims: "
        f'ff.constrain(torch.rand(...), "{names}"), with _ alone for numbers that all rows share',
    )
