"""Stitching: local units, conversions of parameters and reductions of gradients, strung together to one program."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..layout import Layout
from ..mesh import Mesh
from ..program import Func, Instr, Section
from ..spec import Type
from ..unit import Call, GlobalProgram
from .differentiate import REMAT, Joint, LocalUnit, Place, linearize, trace_local
from .draws import split_draws
from .forward import Forward, PlannedCall, Record
from .partition import partition
from .propagate import Plan, propagate
from .reshard import convert_all, steps


@dataclasses.dataclass
class Funcs:
    """Local functions made so far, by what they do: each distinct one is planned and traced once."""

    mesh: Mesh
    layout: Layout
    device: str
    remat: str | int = "none"
    plans: dict[Any, tuple[GlobalProgram, Plan]] = dataclasses.field(default_factory=dict)
    units: dict[Any, LocalUnit] = dataclasses.field(default_factory=dict)
    joints: dict[Any, Joint] = dataclasses.field(default_factory=dict)
    others: dict[Any, Func] = dataclasses.field(default_factory=dict)
    results: dict[Func, list[Place]] = dataclasses.field(default_factory=dict)
    places: dict[Type, Place] = dataclasses.field(default_factory=dict)
    free: dict[tuple[Type, Type], bool] = dataclasses.field(default_factory=dict)
    same: dict[Place, Place] = dataclasses.field(default_factory=dict)
    #: By identity, with what is named by it: a look at equal types that are not the same object costs more.
    seen: dict[tuple[int, int], tuple[Any, Any]] = dataclasses.field(default_factory=dict)

    def place(self, t: Type) -> Place:
        """Where a value lies in memory in the order of its dims."""
        known = self.seen.get((id(t), 0))
        if known is None:
            if t not in self.places:
                self.places[t] = self._one(Place.contiguous(t, self.mesh))
            known = self.seen[id(t), 0] = (t, self.places[t])
        return known[1]

    def _one(self, place: Place) -> Place:
        """Equal places as one object, which is told apart by identity."""
        return self.same.setdefault(place, place)

    def result_places(self, func: Func) -> list[Place]:
        """How the results of a function lie in memory."""
        if func not in self.results:
            nodes = func.graph.output_node().args[0]
            self.results[func] = [self._one(Place.of(n.meta["val"])) for n in nodes]
        return self.results[func]

    def is_free(self, src: Type, dst: Type) -> bool:
        """Whether a conversion changes no local value: R and I look alike."""
        if src is dst:
            return True
        known = self.seen.get((id(src), id(dst)))
        if known is None:
            if (src, dst) not in self.free:
                same = all(s.name in ("pvary", "unvary") for s in steps(src, dst, self.mesh))
                self.free[src, dst] = same and src.dtype == dst.dtype
            known = self.seen[id(src), id(dst)] = ((src, dst), self.free[src, dst])
        return known[1]

    def plan(self, program: GlobalProgram, unit: int, types: Sequence[Type], params: Sequence[Type | None]) -> Plan:
        """The plan of a unit; `params` gives for each input that is a parameter its type in use."""
        key = (id(program), unit, tuple(types), tuple(params))
        if key not in self.plans:
            plan = propagate(program.units[unit], types, self.mesh, self.layout, params)
            split_draws(plan)
            for i, compute in enumerate(params):
                if compute is not None:
                    plan.hoist(i, compute)
            # The program is kept with its plans: what is named by identity must not make room for another.
            self.plans[key] = (program, plan)
        return self.plans[key][1]

    def unit(
        self, plan: Plan, places: Sequence[Place], needs: Sequence[bool], cts: Sequence[bool], share: int = 0
    ) -> LocalUnit:
        """Forward and, if anything needs it, backward of a plan; with a budget, one that saves up to `share` bytes."""
        local, name, key = partition(plan), plan.unit.name, (id(plan), tuple(places), tuple(needs), tuple(cts))
        if not (any(needs) and any(cts)):
            if key not in self.units:
                func = dataclasses.replace(trace_local(local, places, self.device, name), computes=True)
                self.units[key] = LocalUnit(func, len(plan.out_types))
            return self.units[key]
        for policy in REMAT if isinstance(self.remat, int) else [self.remat]:
            if (key, policy) not in self.units:
                if key not in self.joints:
                    self.joints[key] = linearize(local, places, needs, cts, self.device, name)
                self.units[key, policy] = self.joints[key].cut(policy)
            unit = self.units[key, policy]
            if unit.saved_bytes <= share:
                break
        return unit

    def conversion(self, pairs: Sequence[tuple[Type, Type]], places: Sequence[Place], name: str) -> Func:
        """Many conversions at once."""

        def convert(*xs: torch.Tensor) -> list[torch.Tensor]:
            return convert_all(xs, pairs, self.mesh)

        return self.small(convert, places, name, tuple(pairs), device="meta")

    def small(
        self,
        fn: Callable[..., list[torch.Tensor]],
        places: Sequence[Place],
        name: str,
        key: Any = None,
        device: str | None = None,
    ) -> Func:
        """A small local function, such as a sum of two cotangents; told apart by its name, arguments and `key`."""
        known = (name, tuple(places), key)
        if known not in self.others:
            self.others[known] = trace_local(fn, places, device or self.device, name)
        return self.others[known]


class Stitcher:
    """Builds one section after another, over one numbering of values."""

    def __init__(self, funcs: Funcs):
        self.funcs = funcs
        self.mesh = funcs.mesh
        self.types: dict[int, Type] = {}
        self.places: dict[int, Place] = {}
        self.instrs: list[Instr] = []

    def new(self, t: Type, place: Place | None = None) -> int:
        """A new value, contiguous unless its place is given."""
        v = len(self.types)
        self.types[v], self.places[v] = t, place or self.funcs.place(t)
        return v

    def like(self, values: Sequence[int]) -> list[int]:
        """New values of the types and places of others: what another section gave comes in here."""
        return [self.new(self.types[v], self.places[v]) for v in values]

    def small(
        self, fn: Callable[..., list[torch.Tensor]], ins: Sequence[int], t: Type, name: str, key: Any = None
    ) -> int:
        """Emits a small function with one result."""
        # A function without operands makes a tensor itself, and has to say where.
        device = "meta" if ins else None
        return self.emit(self.funcs.small(fn, [self.places[v] for v in ins], name, key, device), ins, [t])[0]

    def contiguous(self, values: Sequence[int]) -> list[int]:
        """The values, copied where they don't lie in memory in the order of their dims."""
        return [
            v
            if self.places[v] == self.funcs.place(self.types[v])
            else self.small(lambda x: [x.contiguous()], [v], self.types[v], "contiguous")
            for v in values
        ]

    def emit(self, func: Func, ins: Sequence[int], types: Sequence[Type]) -> list[int]:
        """Appends a call; the types are those of its results."""
        return self.emit_rows(func, [ins], types)[0]

    def emit_rows(self, func: Func, rows: Sequence[Sequence[int]], types: Sequence[Type]) -> list[list[int]]:
        """Appends a call for many rows of values that are alike."""
        places = self.funcs.result_places(func)
        assert len(types) == len(places)
        n, start = len(places), len(self.types)
        new = range(start, start + n * len(rows))
        self.types.update(zip(new, itertools.cycle(types), strict=False))
        self.places.update(zip(new, itertools.cycle(places), strict=False))
        outs = [list(new[r * n : (r + 1) * n]) for r in range(len(rows))]
        self.instrs.append(Instr(func, tuple(map(tuple, rows)), tuple(map(tuple, outs))))
        return outs

    def section(self, name: str, inputs: Sequence[int], outputs: Sequence[int]) -> Section:
        """What was built since the last section."""
        out = Section(name, tuple(inputs), tuple(outputs), self.instrs, self.types)
        self.instrs = []
        return out

    def convert(self, values: Sequence[int], wanted: Sequence[Type], name: str, bucket: int | None = None) -> list[int]:
        """The values under other types; those that need communication travel in buckets of at most so many bytes."""
        return self.convert_rows([values], wanted, name, bucket)[0]

    def convert_rows(
        self, rows: Sequence[Sequence[int]], wanted: Sequence[Type], name: str, bucket: int | None = None
    ) -> list[list[int]]:
        """Like `convert`, for many rows of values that are alike: equal in types and places, column by column."""
        out = [list(row) for row in rows]
        relabeled: dict[tuple[Type, Place, Type], list[int]] = {}
        todo: list[int] = []
        for k, (v, dst) in enumerate(zip(rows[0], wanted, strict=True)):
            src = self.types[v]
            if not self.funcs.is_free(src, dst):
                todo.append(k)
            elif src != dst:
                relabeled.setdefault((src, self.places[v], dst), []).append(k)
        for (_, place, dst), columns in relabeled.items():
            # The same local value under another name would be freed twice; the alias is a value of its own.
            func = self.funcs.small(lambda x: [x], [place], "relabel", device="meta")
            made = iter(self.emit_rows(func, [[row[k]] for row in rows for k in columns], [dst]))
            for row in out:
                for k in columns:
                    (row[k],) = next(made)
        for columns in _buckets(todo, [self.bytes(rows[0][k]) for k in todo], bucket):
            pairs = [(self.types[rows[0][k]], wanted[k]) for k in columns]
            func = self.funcs.conversion(pairs, [self.places[rows[0][k]] for k in columns], name)
            results = self.emit_rows(func, [[row[k] for k in columns] for row in rows], [dst for _, dst in pairs])
            for row, converted in zip(out, results, strict=True):
                for k, v in zip(columns, converted, strict=True):
                    row[k] = v
        return out

    def bytes(self, v: int) -> int:
        """Bytes of a local value."""
        place = self.places[v]
        return math.prod(place.shape) * place.dtype.itemsize

    def forward(self, program: GlobalProgram, inputs: Sequence[int], params: dict[int, Type]) -> Forward:
        """Emits nothing yet: plans every call of a global program.

        Args:
            program: the global program.
            inputs: this program's values for its inputs.
            params: for inputs that are parameters (by position), the type in use.
        """
        # Equal types as one object: rows are then told apart by identity, which costs a tenth.
        one: dict[Type, Type] = {}
        types = {g: one.setdefault(t, t) for g, t in zip(program.inputs, (self.types[v] for v in inputs), strict=True)}
        in_use = {program.inputs[i]: one.setdefault(t, t) for i, t in params.items()}
        calls = []
        for whole in program.calls:
            # Rows that were alike before they were split may not be alike now.
            alike: dict[Any, list[Call]] = {}
            for row in whole.split():
                key = [id(types[a]) for a in row.args]
                if in_use:
                    key += [id(in_use.get(a)) for a in row.args]
                alike.setdefault(tuple(key), []).append(row)
            for rows in alike.values():
                args = rows[0].args
                plan = self.funcs.plan(program, whole.unit, [types[a] for a in args], [in_use.get(a) for a in args])
                calls.append(PlannedCall(rows, plan))
                outs = [one.setdefault(t, t) for t in plan.out_types]
                for row in rows:
                    types.update(zip(row.outs, outs, strict=True))
        return Forward(program, calls, dict(zip(program.inputs, inputs, strict=True)), in_use, types)

    def run_forward(
        self, f: Forward, needs: dict[int, bool], cts: set[int], which: Sequence[int] | None = None
    ) -> None:
        """Emits the calls of the forward, each after the conversion of its parameters.

        Args:
            f: the planned forward.
            needs: global values that need a cotangent.
            cts: global values that get one.
            which: numbers of the calls to emit, in order; all by default.
        """
        budget, left = (self.funcs.remat, len(f.calls)) if isinstance(self.funcs.remat, int) else (0, 1)
        shared = f.shared(self.mesh)
        for k in range(len(f.calls)) if which is None else which:
            plan = f.calls[k].plan
            alike: dict[Any, list[Call]] = {}
            for call in f.calls[k].rows:
                # Without gradients no row wants any.
                want_in = tuple(needs[a] for a in call.args) if needs else ()
                want_out = tuple(o in cts for o in call.outs) if needs else ()
                places = tuple([id(self.places[f.values[a]]) for a in call.args])
                alike.setdefault((places, want_in, want_out), []).append(call)
            for (_, want_in, want_out), calls in alike.items():
                args = self._arguments(f, calls, plan, range(len(calls[0].args)), shared)
                share = budget // (max(left, 1) * len(calls))
                unit = self.funcs.unit(plan, [self.places[v] for v in args[0]], want_in, want_out, share)
                budget, left = budget - unit.saved_bytes * len(calls), left - 1
                saved_types = [Type.whole(n.meta["val"]) for n in unit.saved_nodes]
                made = self.emit_rows(unit.forward, args, [*plan.out_types, *saved_types])
                for call, given, outs in zip(calls, args, made, strict=True):
                    f.values.update(zip(call.outs, outs, strict=False))
                    if needs:
                        f.records.append(Record(call, plan, unit, given, outs[unit.outputs :]))

    def _arguments(
        self,
        f: Forward,
        calls: Sequence[Call],
        plan: Plan,
        which: Sequence[int],
        shared: frozenset[int] = frozenset(),
    ) -> list[list[int]]:
        """The arguments at some positions of calls that are alike; all parameters of a call are gathered together.

        Those of `shared` stay gathered for the calls that follow.
        """
        rows = [[f.values[call.args[i]] for i in which] for call in calls]
        at = []
        for k, i in enumerate(which):
            there = [f.gathered.get((call.args[i], plan.in_types[i])) for call in calls]
            if calls[0].args[i] not in f.in_use:
                continue
            if shared and None not in there:
                for row, v in zip(rows, there, strict=True):
                    row[k] = v  # type: ignore[assignment]
            else:
                at.append(k)
        if at:
            wanted = [plan.in_types[which[k]] for k in at]
            gathered = self.convert_rows([[row[k] for k in at] for row in rows], wanted, f"{plan.unit.name}.gather")
            for call, row, values in zip(calls, rows, gathered, strict=True):
                for k, v, t in zip(at, values, wanted, strict=True):
                    g = call.args[which[k]]
                    if g in shared and not self.funcs.is_free(self.types[row[k]], t):
                        f.gathered[g, t] = v
                    row[k] = v
        return rows

    def run_backward(
        self,
        f: Forward,
        seeds: dict[int, int],
        on_params: Callable[[str, list[tuple[int, int]]], None],
        reshard: bool,
    ) -> None:
        """Emits the backward calls, last call first.

        Args:
            f: the forward, whose calls are emitted.
            seeds: cotangents of global values, as values of this program.
            on_params: called after each call with the unit's name and the (global value, cotangent) of each use of a
                parameter in it.
            reshard: parameters were freed after the forward and are gathered again (all but those of the last call).
        """
        cts = dict(seeds)
        for k, r in enumerate(reversed(f.records)):
            unit = r.unit
            if unit.backward is None:
                continue
            again = reshard and k > 0
            args = self._arguments(f, [r.call], r.plan, unit.keeps)[0] if again else [r.args[i] for i in unit.keeps]
            given = self.contiguous([cts[r.call.outs[i]] for i in unit.cts])
            types = [r.plan.in_types[i].cotangent() for i in unit.grads]
            outs = self.emit(unit.backward, [*args, *r.saved, *given], types)
            of_params = []
            for i, ct in zip(unit.grads, outs, strict=True):
                g = r.call.args[i]
                if g in f.in_use:
                    of_params.append((g, ct))
                else:
                    cts[g] = self.add(cts[g], ct) if g in cts else ct
            on_params(r.plan.unit.name, of_params)

    def add(self, a: int, b: int) -> int:
        """The sum of two values of one type."""
        return self.small(lambda x, y: [x + y], [a, b], self.types[a], "add")


def _buckets(items: list[int], sizes: list[int], limit: int | None) -> list[list[int]]:
    if limit is None:
        return [items] if items else []
    out: list[list[int]] = []
    filled = 0
    for k, size in zip(items, sizes, strict=True):
        if not out or filled + size > limit:
            out.append([])
            filled = 0
        out[-1].append(k)
        filled += size
    return out
