"""The forward of a program as it is stitched: planned calls, the values so far, and what the backward needs of them."""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from ..mesh import Mesh
from ..spec import Type
from ..unit import Call, GlobalProgram
from .differentiate import LocalUnit
from .propagate import Plan


class Record(NamedTuple):
    """A forward call that was emitted: its converted arguments, and the values its backward needs."""

    call: Call
    plan: Plan
    unit: LocalUnit
    args: list[int]
    saved: list[int]


@dataclasses.dataclass(frozen=True)
class PlannedCall:
    """A call with its plan, one for all of its rows."""

    rows: list[Call]
    plan: Plan


@dataclasses.dataclass
class Forward:
    """A planned forward: its calls, the values so far, and what the backward needs."""

    program: GlobalProgram
    calls: list[PlannedCall]
    values: dict[int, int]
    in_use: dict[int, Type]
    types: dict[int, Type]
    records: list[Record] = dataclasses.field(default_factory=list)
    #: Parameters that stay gathered until their last use in the forward, by their type there.
    gathered: dict[tuple[int, Type], int] = dataclasses.field(default_factory=dict)

    def shared(self, mesh: Mesh) -> frozenset[int]:
        """Parameters of several calls, if all of them together are no more than what one call gathers anyway."""
        if not self.in_use:
            return frozenset()
        uses: Counter[int] = Counter()
        most = 0

        def size(values: Iterable[int]) -> int:
            types = [self.in_use[g] for g in values]
            return sum(math.prod(t.local_shape(mesh)) * t.dtype.itemsize for t in types)

        for call in self.calls:
            for row in call.rows:
                uses.update({a for a in row.args if a in self.in_use})
        many = {g for g, n in uses.items() if n > 1}
        if many:
            rows = (row for call in self.calls for row in call.rows)
            most = max(size({a for a in row.args if a in self.in_use}) for row in rows)
        return frozenset(many) if size(many) <= most else frozenset()

    def uses(self) -> Counter[int]:
        """For each parameter how many calls of the backward give a cotangent of it."""
        backward = [r for r in self.records if r.unit.backward is not None]
        return Counter(r.call.args[i] for r in backward for i in r.unit.grads)

    def out_types(self) -> list[Type]:
        """Types of the program's outputs."""
        return [self.types[o] for o in self.program.outputs]
