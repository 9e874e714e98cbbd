"""The mesh: an n-dimensional grid of ranks with named axes, as pure data."""

import itertools
import math
import re
from collections.abc import Iterable

from .errors import MeshError, fail, message, nearest, raise_all

Axes = str | tuple[str, ...]


def as_axes(axes: Axes | None) -> tuple[str, ...]:
    """Normalises `None`, a name or a tuple of names to a tuple of names."""
    if axes is None:
        return ()
    return tuple(axes) if isinstance(axes, tuple | list) else (axes,)


class Mesh:
    """An n-dimensional grid of ranks with named axes, outermost first.

    It needs no process group: it is bound to `torch.distributed` only when a program runs. Rank numbers are
    row-major: the last axis varies fastest, so put the axis that communicates most last.

    Raises:
        MeshError: a size that is not a positive integer, or no valid axis name.

    >>> mesh = Mesh(dp=2, tp=2)
    >>> mesh
    Mesh(dp=2, tp=2)
    >>> mesh.coords(2)
    {'dp': 1, 'tp': 0}
    >>> mesh.groups("dp")
    [[0, 2], [1, 3]]
    """

    __slots__ = ("sizes",)

    def __init__(self, **sizes: int):
        problems = []
        for name, size in sizes.items():
            number = None
            if not name.isidentifier():
                number = f"{name!r} is not a Python name"
                rule = "axes are keywords of Mesh and stand in specs and programs, separated by commas"
                fix = re.sub(r"\W", "_", name) or "dp"
                fix = f"a name such as {fix if fix.isidentifier() else '_' + fix!r}"
            elif isinstance(size, bool) or not isinstance(size, int) or size < 1:
                number = f"axis {name!r} has size {size!r}, which is not a positive integer"
                rule = "every axis of a mesh has one rank or more"
                fix = f"{name}=1, or no axis {name!r}"
            if number:
                call = f"Mesh({', '.join(f'{k}={v!r}' for k, v in sizes.items())})"
                problems.append(message(call=call, got=f"{name}={size!r}", number=number, rule=rule, fix=fix))
        raise_all(MeshError, problems)
        self.sizes: dict[str, int] = dict(sizes)

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the axes, outermost first."""
        return tuple(self.sizes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes, outermost first."""
        return tuple(self.sizes.values())

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.shape)

    def __getitem__(self, axis: str) -> int:
        self.check((axis,))
        return self.sizes[axis]

    def __contains__(self, axis: object) -> bool:
        return axis in self.sizes

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{k}={v}' for k, v in self.sizes.items())})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mesh) and list(self.sizes.items()) == list(other.sizes.items())

    def __hash__(self) -> int:
        return hash(tuple(self.sizes.items()))

    def check(self, axes: Iterable[str], call: str = "mesh[...]") -> None:
        """Raises MeshError for names that are no axis of this mesh."""
        for axis in axes:
            if axis not in self.sizes:
                fail(
                    MeshError,
                    call=call,
                    got=f"axis {axis!r} on {self!r}",
                    number=f"{axis!r} is not one of the axes {list(self.axes)}",
                    rule="a mesh axis is named when the mesh is made",
                    fix=nearest(str(axis), self.axes),
                )

    def ordered(self, axes: Iterable[str]) -> tuple[str, ...]:
        """The given axes in the mesh's own order, outermost first."""
        wanted = set(axes)
        return tuple(a for a in self.axes if a in wanted)

    def count(self, axes: Axes) -> int:
        """Number of ranks in one group over `axes`."""
        return math.prod(self[a] for a in as_axes(axes))

    def coords(self, rank: int) -> dict[str, int]:
        """Position of `rank` along each axis."""
        if not 0 <= rank < self.size:
            fail(
                MeshError,
                call=f"{self!r}.coords({rank})",
                got=f"rank {rank}",
                number=f"rank {rank} is outside 0..{self.size - 1}",
                rule="a mesh has as many ranks as the product of its sizes",
                fix=f"a rank below {self.size}",
            )
        out = {}
        for axis, size in reversed(self.sizes.items()):
            rank, out[axis] = divmod(rank, size)
        return {a: out[a] for a in self.axes}

    def rank(self, **coords: int) -> int:
        """The rank at a position; axes that are not given are at 0."""
        self.check(coords, call="mesh.rank(...)")
        outside = {axis: at for axis, at in coords.items() if not 0 <= at < self.sizes[axis]}
        if outside:
            fail(
                MeshError,
                call=f"{self!r}.rank({', '.join(f'{a}={at}' for a, at in coords.items())})",
                got=", ".join(f"{a}={at}" for a, at in outside.items()),
                number=", ".join(f"{at} is outside 0..{self.sizes[a] - 1} on axis {a!r}" for a, at in outside.items()),
                rule="a position is counted from 0 along each axis",
                fix=f"{self!r}.rank({', '.join(f'{a}={at % self.sizes[a]}' for a, at in coords.items())})",
            )
        out = 0
        for axis, size in self.sizes.items():
            out = out * size + coords.get(axis, 0)
        return out

    def index(self, rank: int, axes: Axes) -> int:
        """Position of `rank` within its group over `axes`, the first axis major."""
        at, out = self.coords(rank), 0
        for axis in as_axes(axes):
            out = out * self[axis] + at[axis]
        return out

    def group(self, rank: int, axes: Axes) -> list[int]:
        """The ranks that share all coordinates but those of `axes` with `rank`, in index order."""
        names, at = as_axes(axes), self.coords(rank)
        ranges = itertools.product(*(range(self[a]) for a in names))
        return [self.rank(**{**at, **dict(zip(names, c, strict=True))}) for c in ranges]

    def groups(self, axes: Axes) -> list[list[int]]:
        """All groups over `axes`; each rank is in exactly one."""
        names = as_axes(axes)
        return [self.group(r, names) for r in range(self.size) if self.index(r, names) == 0]
