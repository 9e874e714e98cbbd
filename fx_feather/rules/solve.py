"""Solving: the one algorithm that says, from its factors, how an operator's operands and results are split."""

import dataclasses
from collections.abc import Mapping, Sequence

import torch

from ..mesh import Mesh
from ..spec import Type
from .rule import Dim, Factors, Sharding


class Conflict(Exception):
    """Why the operands of an operator do not fit together; the caller makes a message of it.

    Args:
        kind: `axis` (one axis, two factors), `order` (one factor, two orders of axes), `whole`, `divide`, `merge`.
        axis: the mesh axis at fault.
        operands: numbers of the operands at fault.
        detail: one clause with the numbers.
    """

    def __init__(self, kind: str, axis: str, operands: list[int], detail: str, factor: str = ""):
        super().__init__(detail)
        self.kind, self.axis, self.operands, self.detail, self.factor = kind, axis, operands, detail, factor


@dataclasses.dataclass(frozen=True)
class Solution:
    """What an operator call needs and gives: the types its operands must be converted to, and those of its results."""

    targets: tuple[Type, ...]
    results: tuple[Type, ...]
    factor_axes: Mapping[str, tuple[str, ...]]


def split_factors(dim: Dim, axes: tuple[str, ...], sizes: Mapping[str, int], mesh: Mesh) -> dict[str, tuple[str, ...]]:
    """Which factor of a dim each of the axes splits: the major one first, as long as it divides.

    An axis of one rank splits nothing, so it stays with the factor that the axes before it split.
    """
    if not axes:
        return {}
    if len(dim) == 1:
        return {dim[0]: axes}
    out: dict[str, tuple[str, ...]] = {}
    rest = list(axes)
    for f in dim:
        left = sizes[f]
        while rest and (left > 1 or mesh[rest[0]] == 1) and left % mesh[rest[0]] == 0:
            left //= mesh[rest[0]]
            out[f] = (*out.get(f, ()), rest.pop(0))
        if left > 1:
            break
    if rest:
        raise Conflict("divide", rest[0], [], f"a dim of factors {[sizes[f] for f in dim]} over {mesh[rest[0]]} ranks")
    return out


def solve(s: Sharding, types: Sequence[Type], mesh: Mesh) -> Solution:
    """Decides for one operator how every operand must be split and how its results are.

    For each mesh axis at most one factor is split. An operand that has the factor whole takes its own part; one
    without the factor becomes R; a factor that is absent from the results leaves them partial. A pending sum passes
    through what is linear in it and is resolved otherwise.

    Raises:
        Conflict: the operands do not fit together.
    """
    chosen: dict[str, tuple[str, ...]] = {}
    holder: dict[str, int] = {}
    live = [i for i in range(len(types)) if i not in s.ignored]
    for i in live:
        for dim, axes in zip(s.operands[i], types[i].dims, strict=True):
            if not axes:
                continue
            if not dim:
                raise Conflict("whole", axes[0], [i], "a dim of size 1 is split and broadcast")
            try:
                per_factor = split_factors(dim, axes, s.sizes, mesh)
            except Conflict as c:
                c.operands.append(i)
                raise
            for f, mine in per_factor.items():
                if f in s.whole:
                    raise Conflict("whole", mine[0], [i], f"factor {f!r} (size {s.sizes[f]}) is split by {mine}", f)
                old = chosen.get(f, ())
                short, long = sorted((old, mine), key=len)
                if long[: len(short)] != short:
                    raise Conflict("order", mine[0], [holder[f], i], f"factor {f!r} is split by {old} and by {mine}")
                if len(mine) > len(old):
                    chosen[f], holder[f] = mine, i
    for i in s.ignored:
        used = {a for axes in chosen.values() for a in axes}
        for dim, axes in zip(s.operands[i], types[i].dims, strict=True):
            follows = len(dim) == 1 and dim[0] not in chosen and dim[0] not in s.whole and not used & set(axes)
            if axes and follows and not (dim[0] in s.even and s.sizes[dim[0]] % mesh.count(axes)):
                chosen[dim[0]], holder[dim[0]] = axes, i
    of_axis: dict[str, str] = {}
    for f, axes in chosen.items():
        for a in axes:
            if a in of_axis:
                g = of_axis[a]
                raise Conflict("axis", a, [holder[g], holder[f]], f"axis {a!r} splits factors {g!r} and {f!r}")
            of_axis[a] = f
        if f in s.even and s.sizes[f] % mesh.count(axes):
            raise Conflict("divide", axes[0], [holder[f]], f"size {s.sizes[f]} over {mesh.count(axes)} ranks")

    def dims_of(factors: Factors, shape: tuple[int, ...]) -> tuple[tuple[str, ...], ...]:
        out = []
        for dim in factors:
            axes: tuple[str, ...] = ()
            for k, f in enumerate(dim):
                mine = chosen.get(f, ())
                if mine and any(s.sizes[g] != mesh.count(chosen.get(g, ())) for g in dim[:k]):
                    raise Conflict("merge", mine[0], [holder[f]], f"factor {f!r} is split but is not major in its dim")
                if len(dim) > 1 and s.sizes[f] % mesh.count(mine):
                    raise Conflict("divide", mine[0], [holder[f]], f"size {s.sizes[f]} over {mesh.count(mine)} ranks")
                axes += mine
            out.append(axes)
        return tuple(out)

    targets = [dims_of(s.operands[i], types[i].shape) if i in live else types[i].dims for i in range(len(types))]
    outs = [dims_of(r, ()) for r in s.results]
    varies: set[str] = set(of_axis)
    passing: dict[str, frozenset[int]] = {}
    for axis in mesh.axes:
        if axis in of_axis:
            continue
        pending = frozenset(i for i in live if axis in types[i].partial)
        if pending:
            fits = [g for g in s.linear if pending == g or (s.spread and pending <= g)]
            # A pending sum in one operand of a product is a factor of all ranks: one that passes must be alone.
            if fits:
                passing[axis] = fits[0]
                varies.add(axis)
                continue
        if any(axis in types[i].replicated for i in live):
            varies.add(axis)

    final = []
    for i, t in enumerate(types):
        if i in s.ignored:
            final.append(t)
            continue
        split = {a for d in targets[i] for a in d}
        partial = frozenset(a for a, g in passing.items() if i in g)
        replicated = frozenset(varies) - split - partial
        final.append(t.with_(dims=targets[i], partial=partial, replicated=replicated))
    reduced_sum = {
        a
        for f, axes in chosen.items()
        for a in axes
        if not any(f in dim for r in s.results for dim in r) and s.reduced.get(f, "sum") == "sum"
    }
    reduced_other = {
        a
        for f, axes in chosen.items()
        for a in axes
        if not any(f in dim for r in s.results for dim in r) and s.reduced.get(f, "sum") != "sum"
    }
    results = []
    for dims in outs:
        split = {a for d in dims for a in d}
        partial = frozenset(reduced_sum | set(passing))
        replicated = frozenset(varies) - split - partial - reduced_other
        results.append((dims, partial, replicated))
    return Solution(
        tuple(final),
        tuple(Type(torch.float32, (), d, p, r) for d, p, r in results),
        chosen,
    )
