"""Parts: of a value that several ranks hold alike each rank sums a part, where only the sum is wanted."""

import dataclasses
import functools as ft
import itertools
import math
from collections.abc import Sequence

from ..mesh import Mesh
from ..program import Func, Instr
from ..spec import Type, local_size
from ..unit import GlobalProgram
from .differentiate import Place
from .fuse import Merged, merge
from .stitch import Stitcher

#: Elements of a value below which each rank sums all of it.
WORTH_PARTS = 1 << 15


def in_parts(
    s: Stitcher, program: GlobalProgram, values: Sequence[int], result: int
) -> tuple[GlobalProgram, list[int]]:
    """Lets each rank sum its own part of the first inputs that several ranks hold alike, where one result needs sums.

    Doesn't keep results bit for bit: a sum of parts is taken in another order, as wherever a layout splits a value.

    Args:
        s: where to cut the values.
        program: the global program.
        values: for its first inputs.
        result: the value of the program that is made of sums, such as a norm.

    Returns:
        The program with further inputs, which calls that give numbers alone take in the place of the first ones; and
        the values for them.
    """
    needed = {result}
    sums: set[int] = set()
    for k in reversed(range(len(program.calls))):
        call = program.calls[k]
        if needed.intersection(call.outs):
            needed.update(call.args)
            if not any(o.meta["val"].ndim for o in program.units[call.unit].outputs):
                sums.add(k)
    summed = {a for k in sums for a in program.calls[k].args}
    alike: dict[tuple[Type, Place, Type], list[int]] = {}
    part_of = ft.cache(_part)  # leaves share their types
    for g, v in zip(program.inputs, values, strict=False):
        t = s.types[v]
        part = part_of(t, s.mesh)
        if g in summed and part != t and math.prod(t.shape) >= WORTH_PARTS:
            alike.setdefault((t, s.places[v], part), []).append(g)
    number = dict(zip(program.inputs, values, strict=False))
    free = itertools.count(1 + max(itertools.chain(program.inputs, *(c.outs for c in program.calls))))
    new: dict[int, int] = {}
    made: list[int] = []
    for (_, _, part), gs in alike.items():
        made += [v for (v,) in s.convert_rows([[number[g]] for g in gs], [part], "part")]
        new.update(zip(gs, free, strict=False))
    calls = [
        c._replace(args=tuple(new.get(a, a) for a in c.args)) if k in sums else c for k, c in enumerate(program.calls)
    ]
    return dataclasses.replace(program, calls=calls, inputs=(*program.inputs, *new.values())), made


def at_its_use(instrs: Sequence[Instr], values: Sequence[int]) -> list[Instr]:
    """Calls in another order: each of some values is made by the call that uses it, or right before.

    Args:
        instrs: the calls.
        values: made by calls that give one value a row, each used by one row of another call.
    """
    late = set(values)
    maker = {
        o: Instr(i.func, (ins,), (outs,))
        for i in instrs
        for ins, outs in zip(i.ins, i.outs, strict=True)
        for o in outs
        if o in late
    }
    joined: dict[tuple[Func, Func, int], Merged] = {}
    out: list[Instr] = []
    for i in instrs:
        if late.issuperset(v for outs in i.outs for v in outs):
            continue
        if not any(v in late for ins in i.ins for v in ins):
            out.append(i)
            continue
        rows: dict[Func, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
        for ins, outs in zip(i.ins, i.outs, strict=True):
            at = [k for k, v in enumerate(ins) if v in late]
            if len(at) != 1 or i.func.constants:
                out += [*(maker[ins[k]] for k in at), Instr(i.func, (ins,), (outs,))]
                continue
            first = maker[ins[at[0]]]
            key = (first.func, i.func, at[0])
            if key not in joined:
                joined[key] = merge(first.func, i.func, {at[0]: 0}, ())
            func, operands, _ = joined[key]
            rows.setdefault(func, []).append((tuple((first.ins[0], ins)[side][k] for side, k in operands), outs))
        out += [Instr(func, *(tuple(column) for column in zip(*found, strict=True))) for func, found in rows.items()]
    return out


def _part(t: Type, mesh: Mesh) -> Type:
    """The type split further over all axes on which it is the same, along a dim that they divide; else as it is."""
    axes = tuple(a for a in mesh.axes if mesh[a] > 1 and t.state(a) in ("I", "R"))
    for d, (n, own) in enumerate(zip(t.shape, t.dims, strict=True)):
        if axes and t.even(mesh) and local_size(n, own, mesh) % mesh.count(axes) == 0:
            split = (*t.dims[:d], (*own, *axes), *t.dims[d + 1 :])
            return t.with_(dims=split, replicated=t.replicated - frozenset(axes))
    return t
