"""Parts: of a value that several ranks hold alike each rank sums a part, where only the sum is wanted."""

import dataclasses
import itertools
import math
from collections.abc import Sequence

from ..mesh import Mesh
from ..spec import Type, local_size
from ..unit import GlobalProgram
from .differentiate import Place
from .stitch import Stitcher

#: Elements of a value below which each rank sums all of it.
WORTH_PARTS = 1 << 15


def in_parts(s: Stitcher, program: GlobalProgram, values: Sequence[int]) -> tuple[GlobalProgram, list[int]]:
    """Lets each rank sum its own part of the first inputs that several ranks hold alike, such as for their norm.

    Sums of parts are sums of other numbers than those of the whole, as wherever a layout splits a value.

    Args:
        s: where to cut the values.
        program: the global program.
        values: for its first inputs.

    Returns:
        The program with further inputs, which calls that give numbers alone take in the place of the first ones; and
        the values for them.
    """
    sums = {k for k, u in enumerate(program.units) if u.outputs and not any(o.meta["val"].ndim for o in u.outputs)}
    summed = {a for call in program.calls if call.unit in sums for a in call.args}
    alike: dict[tuple[Type, Place, Type], list[int]] = {}
    for g, v in zip(program.inputs, values, strict=False):
        t = s.types[v]
        part = _part(t, s.mesh)
        if g in summed and part != t and math.prod(t.shape) >= WORTH_PARTS:
            alike.setdefault((t, s.places[v], part), []).append(g)
    number = dict(zip(program.inputs, values, strict=False))
    free = itertools.count(1 + max(itertools.chain(program.inputs, *(c.outs for c in program.calls))))
    new: dict[int, int] = {}
    made: list[int] = []
    for (_, _, part), gs in alike.items():
        made += [v for (v,) in s.convert_rows([[number[g]] for g in gs], [part], "part")]
        new.update(zip(gs, free, strict=False))
    calls = [c._replace(args=tuple(new.get(a, a) for a in c.args)) if c.unit in sums else c for c in program.calls]
    return dataclasses.replace(program, calls=calls, inputs=(*program.inputs, *new.values())), made


def _part(t: Type, mesh: Mesh) -> Type:
    """The type split further over all axes on which it is the same, along a dim that they divide; else as it is."""
    axes = tuple(a for a in mesh.axes if mesh[a] > 1 and t.state(a) in ("I", "R"))
    for d, (n, own) in enumerate(zip(t.shape, t.dims, strict=True)):
        if axes and t.even(mesh) and local_size(n, own, mesh) % mesh.count(axes) == 0:
            split = (*t.dims[:d], (*own, *axes), *t.dims[d + 1 :])
            return t.with_(dims=split, replicated=t.replicated - frozenset(axes))
    return t
