"""Numbers that an update reads, such as a rate: 0-dim values that can be made, and looked at, before it begins."""

import dataclasses
from collections.abc import Sequence

import torch

from .. import kernels as kernels  # defines operators that are used below
from ..source import label
from ..spec import Type
from ..unit import Call, GlobalProgram
from .forward import Forward
from .stitch import Stitcher

_CHECKED = (torch.ops.fx_feather.scheduled.default, torch.ops.fx_feather.finite.default)


@dataclasses.dataclass(frozen=True)
class Numbers:
    """The numbers of an update.

    Attributes:
        ahead: calls that make them, and that an update can do before anything is written over.
        names: of the floating point ones that the rest of the update reads, what the first reader calls each, such as
            `lr of adamw`.
        bounded: whether the rest gives finite values for sure, for finite values and numbers of moderate size.
    """

    ahead: list[int]
    names: dict[int, str]
    bounded: bool

    @classmethod
    def of(
        cls,
        program: GlobalProgram,
        f: Forward,
        rows: Sequence[Sequence[Call]],
        given: Sequence[int],
        early: Sequence[int],
        late: Sequence[int],
    ) -> "Numbers":
        """Finds them.

        Args:
            program: of the update.
            f: its plan.
            rows: of each call.
            given: inputs that are numbers if they have no dims.
            early: calls that are done first.
            late: calls of the update, in order.
        """
        found = [*given, *(o for k in early for row in rows[k] for o in row.outs)]
        numbers = {v for v in found if not (f.types[v].shape or f.types[v].partial)}
        simple = set()
        for k in (*early, *late):
            if all(numbers.issuperset(row.args) and all(not f.types[o].shape for o in row.outs) for row in rows[k]):
                numbers.update(o for row in rows[k] for o in row.outs)
                simple.add(k)
        names: dict[int, str] = {}
        rest = [k for k in late if k not in simple]
        for k in rest:
            for row in rows[k]:
                unit = program.units[row.unit]
                for v, node in zip(row.args, unit.inputs, strict=True):
                    if v in numbers and v not in names and node.meta["val"].dtype.is_floating_point:
                        names[v] = f"{label(node)} of {unit.name}"
        bounded = all(program.units[rows[k][0].unit].bounded for k in rest)
        return cls([k for k in late if k in simple and k not in early], names, bounded)

    def vector(self, s: Stitcher, f: Forward) -> list[int]:
        """Those that have names as one vector in float64, the same on every rank; nothing for none."""
        values = [f.values[v] for v in self.names]
        if not values:
            return []
        same = s.convert(
            values, [s.types[v].with_(partial=frozenset(), replicated=frozenset()) for v in values], "check"
        )
        t = Type(torch.float64, (len(values),), ((),))
        return [s.small(lambda *xs: [torch.stack([x.to(torch.float64) for x in xs])], same, t, "numbers")]


def checked(program: GlobalProgram) -> list[int]:
    """The numbers of an update that raise if they are not fine: that must be before anything is written over."""
    found = {i for i, unit in enumerate(program.units) if any(n.target in _CHECKED for n in unit.graph.nodes)}
    return [o for call in program.calls if call.unit in found for o in call.outs]
