"""What a layout means for one tensor: for every dim the mesh axes that split it, and the state on each axis."""

import dataclasses
from collections.abc import Iterable

import torch

from .errors import ShapeError, SpecError, fail
from .mesh import Axes, Mesh, as_axes

Dims = tuple[tuple[str, ...], ...]

_DTYPE_NAMES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.bool: "bool",
}


def show_axes(axes: Iterable[str]) -> str:
    """`@tp` for one axis, `@(dp,fsdp)` for several, nothing for none."""
    names = tuple(axes)
    if not names:
        return ""
    return "@" + (names[0] if len(names) == 1 else f"({','.join(names)})")


class P:
    """The spec of one tensor: for each dim the mesh axes that split it, major to minor.

    Trailing dims may be left out. `partial=` names the axes over which the value is a pending sum.
    As JAX's `PartitionSpec`.

    Raises:
        SpecError: an axis that is used twice, or an entry that is no name.

    >>> P("dp", None, ("fsdp", "tp"))
    P('dp', None, ('fsdp', 'tp'))
    >>> P("dp", partial="tp")
    P('dp', partial='tp')
    """

    __slots__ = ("dims", "partial")

    def __init__(self, *dims: Axes | None, partial: Axes | None = None):
        given = [a for d in (*dims, partial) if d is not None for a in (d if isinstance(d, tuple | list) else (d,))]
        nameless = [a for a in given if not isinstance(a, str)]
        if nameless:
            fail(
                SpecError,
                call=f"P({', '.join(map(repr, dims))}{'' if partial is None else f', partial={partial!r}'})",
                got=f"entries {given}",
                number=f"{nameless[0]!r} is no name of a mesh axis",
                rule="the entry of a dim is None, the name of an axis, or a tuple of names, major first",
                fix='such as P("dp", None, ("fsdp", "tp"))',
            )
        self.dims: Dims = tuple(as_axes(d) for d in dims)
        self.partial: tuple[str, ...] = as_axes(partial)
        used = [a for d in self.dims for a in d] + list(self.partial)
        twice = sorted({a for a in used if used.count(a) > 1})
        if twice:
            fail(
                SpecError,
                call=repr(self),
                got=f"axes {used}",
                number=", ".join(f"axis {a!r} is used {used.count(a)} times" for a in twice),
                rule="an axis splits at most one dim of a tensor, or makes it partial: its ranks hold one part each",
                fix=f"leave {' and '.join(map(repr, twice))} on one dim only",
            )

    def __repr__(self) -> str:
        def one(axes: tuple[str, ...]) -> str:
            return "None" if not axes else repr(axes[0] if len(axes) == 1 else axes)

        parts = [one(d) for d in self.dims]
        if self.partial:
            parts.append(f"partial={one(self.partial)}")
        return f"P({', '.join(parts)})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, P) and self.dims == other.dims and set(self.partial) == set(other.partial)

    def __hash__(self) -> int:
        return hash((self.dims, frozenset(self.partial)))

    def padded(self, ndim: int) -> Dims:
        """The axes of all `ndim` dims, with the trailing ones filled in."""
        if len(self.dims) > ndim:
            fail(
                SpecError,
                call=repr(self),
                got=f"a tensor of {ndim} dims",
                number=f"the spec names {len(self.dims)} dims, the tensor has {ndim}",
                rule="a spec has at most one entry a dim",
                fix=f"{P(*self.dims[:ndim], partial=self.partial or None)!r}",
            )
        return self.dims + ((),) * (ndim - len(self.dims))


@dataclasses.dataclass(frozen=True)
class Type:
    """The type of a value in a local program: its global shape, and its state on every mesh axis.

    On an axis a value is *sharded* (V, the axis is in `dims`), *partial* (the true value is the sum over the
    axis), *replicated* (R: the same everywhere, used differently on each rank, so its cotangent is partial) or else
    *invariant* (I: the same everywhere, and so is every use of it).

    Args:
        dtype: of the elements.
        shape: the global shape.
        dims: for each dim the axes that split it, major first. A dim of size n over k ranks gives each
            `ceil(n / k)` elements, nested from major to minor; what is beyond n is padding.
        partial: axes over which the value is a pending sum.
        replicated: axes on which the value is R.
        names: dim names where known, for messages only.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    dims: Dims
    partial: frozenset[str] = frozenset()
    replicated: frozenset[str] = frozenset()
    names: tuple[str, ...] | None = dataclasses.field(default=None, compare=False)

    def __hash__(self) -> int:
        # Types are keys of many tables: the hash is computed once.
        known = self.__dict__.get("_hash")
        if known is None:
            known = hash((self.dtype, self.shape, self.dims, self.partial, self.replicated))
            object.__setattr__(self, "_hash", known)
        return known

    @classmethod
    def whole(cls, x: torch.Tensor, names: tuple[str, ...] | None = None) -> "Type":
        """The type of a tensor that every rank holds whole and uses alike."""
        return cls(x.dtype, tuple(x.shape), ((),) * x.ndim, names=names)

    @property
    def sharded(self) -> frozenset[str]:
        """All axes that split some dim."""
        return frozenset(a for d in self.dims for a in d)

    @property
    def axes(self) -> frozenset[str]:
        """All axes on which the value is not invariant."""
        return self.sharded | self.partial | self.replicated

    def state(self, axis: str) -> str:
        """`V`, `partial`, `R` or `I`."""
        if axis in self.sharded:
            return "V"
        if axis in self.partial:
            return "partial"
        return "R" if axis in self.replicated else "I"

    def dim_of(self, axis: str) -> int | None:
        """The dim that `axis` splits."""
        return next((i for i, d in enumerate(self.dims) if axis in d), None)

    def with_(self, **changes: object) -> "Type":
        """A copy with some fields changed."""
        # Equal changes give one object: types of leaves that are alike are then compared by identity.
        made: dict[object, Type] = self.__dict__.setdefault("_made", {})
        key = tuple(changes.items())
        if key not in made:
            made[key] = dataclasses.replace(self, **changes)  # type: ignore[arg-type]
        return made[key]

    def stacked(self, n: int) -> "Type":
        """The type of `n` values of this type as one, along a new first dim."""
        return self.with_(shape=(n, *self.shape), dims=((), *self.dims), names=None)

    def local_shape(self, mesh: Mesh) -> tuple[int, ...]:
        """The shape that each rank holds, padding included."""
        return tuple(local_size(n, axes, mesh) for n, axes in zip(self.shape, self.dims, strict=True))

    def even(self, mesh: Mesh) -> bool:
        """Whether no rank holds padding."""
        return all(
            n == s * mesh.count(a) for n, s, a in zip(self.shape, self.local_shape(mesh), self.dims, strict=True)
        )

    def cotangent(self) -> "Type":
        """The type of this value's cotangent: R and partial change places."""
        return self.with_(partial=self.replicated, replicated=self.partial)

    def spec(self) -> P:
        """The spec, without R and I."""
        return P(*self.dims, partial=tuple(sorted(self.partial)) or None)

    def __repr__(self) -> str:
        return self.show()

    def show(self, states: bool = False) -> str:
        """The one notation, `bf16[4096@fsdp, 11008@tp]{partial=dp}`; with `states`, R axes and dim names too."""
        dims = ", ".join(f"{n}{show_axes(a)}" for n, a in zip(self.shape, self.dims, strict=True))
        out = f"{_DTYPE_NAMES.get(self.dtype, str(self.dtype).removeprefix('torch.'))}[{dims}]"
        if self.partial:
            out += f"{{partial={','.join(sorted(self.partial))}}}"
        if states and self.replicated:
            out += f"{{R={','.join(sorted(self.replicated))}}}"
        if states and self.names:
            out += f" ({' '.join(self.names)})"
        return out


def local_size(n: int, axes: Iterable[str], mesh: Mesh) -> int:
    """Elements of a dim of size n that each rank holds when `axes` split it, padding included."""
    for a in axes:
        n = -(-n // mesh[a])
    return n


def extent(n: int, axes: Iterable[str], mesh: Mesh, rank: int) -> tuple[int, int]:
    """Start and number of the true elements (no padding) that `rank` holds of a dim of size n.

    >>> [extent(5, ("dp",), Mesh(dp=4), r) for r in range(4)]
    [(0, 2), (2, 2), (4, 1), (5, 0)]
    """
    at, start, count = mesh.coords(rank), 0, n
    size = n
    for a in axes:
        size = -(-size // mesh[a])
        skip = min(at[a] * size, count)
        start, count = start + skip, max(0, min(size, count - skip))
    return start, count


def slices(t: Type, mesh: Mesh, rank: int) -> tuple[slice, ...]:
    """The part of the global tensor that `rank` holds, without padding."""
    parts = (extent(n, a, mesh, rank) for n, a in zip(t.shape, t.dims, strict=True))
    return tuple(slice(start, start + count) for start, count in parts)


def pad_to(x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Adds zeros at the end of each dim up to `shape`."""
    if tuple(x.shape) == shape:
        return x
    widths = [w for have, want in zip(reversed(x.shape), reversed(shape), strict=True) for w in (0, want - have)]
    return torch.nn.functional.pad(x, widths)


def shard(x: torch.Tensor, t: Type, mesh: Mesh, rank: int) -> torch.Tensor:
    """The local part of a whole tensor: padded with zeros, and zero off index 0 of each partial axis.

    Raises:
        ShapeError: `x` has another shape than the type says.
    """
    if tuple(x.shape) != t.shape:
        fail(
            ShapeError,
            call=f"shard(x, {t})",
            got=f"x of shape {list(x.shape)} on {mesh!r}",
            number=f"shape {list(x.shape)} is not {list(t.shape)}",
            rule="a whole value is split by the type of that very value",
            fix=f"pass a tensor of shape {list(t.shape)}",
        )
    part = pad_to(x[slices(t, mesh, rank)], t.local_shape(mesh)).contiguous()
    coords = mesh.coords(rank)
    return torch.zeros_like(part) if any(coords[a] for a in t.partial) else part


def assemble(parts: list[torch.Tensor], t: Type, mesh: Mesh) -> torch.Tensor:
    """The whole tensor from the local parts of all ranks, in rank order.

    Raises:
        ShapeError: a part of the wrong size, or a missing one.
    """
    want = t.local_shape(mesh)
    wrong = [f"rank {r} holds {list(p.shape)}" for r, p in enumerate(parts) if tuple(p.shape) != want]
    if wrong or len(parts) != mesh.size:
        fail(
            ShapeError,
            call=f"assemble(parts, {t})",
            got="; ".join(wrong) or f"{len(parts)} parts on {mesh!r}",
            number=f"each of {mesh.size} ranks must hold {list(want)}",
            rule="the parts of one value have one shape: a dim of size n over k ranks is ceil(n/k), padded",
            fix="build the parts with shard(...)",
        )
    out = torch.zeros(t.shape, dtype=parts[0].dtype, device=parts[0].device)
    for rank, part in enumerate(parts):
        at = mesh.coords(rank)
        # On an axis that neither splits the value nor holds a part of a sum, every rank has the same: take the first.
        if any(at[a] for a in mesh.axes if a not in t.sharded and a not in t.partial):
            continue
        where = slices(t, mesh, rank)
        true = tuple(slice(0, s.stop - s.start) for s in where)
        out[where] = out[where] + part[true] if t.partial else part[true]
    return out


def check_names(x: torch.Tensor, dims: str) -> None:
    """Raises SpecError if a string doesn't name the dims of a tensor, each once."""
    if not isinstance(x, torch.Tensor) or not isinstance(dims, str):
        fail(
            SpecError,
            call=f"constrain({type(x).__name__}, {dims!r})",
            got=f"{type(x).__name__} and {type(dims).__name__}",
            number=f"{dims!r} is not a string" if not isinstance(dims, str) else f"{type(x).__name__} is not a tensor",
            rule="the dims of one tensor are named by one string, separated by blanks",
            fix='constrain(x, "batch seq embed")',
        )
    names = dims.split()
    twice = [n for n in names if n != "_" and names.count(n) > 1]
    if len(names) != x.ndim or twice:
        fail(
            SpecError,
            call=f"constrain(x, {dims!r})",
            got=f"x of shape {list(x.shape)}",
            number=f"{twice[0]!r} is named twice" if twice else f"{len(names)} names for {x.ndim} dims",
            rule="each dim has one name of its own, so that a layout can say how it is split",
            fix=f'constrain(x, "{" ".join((names + ["_"] * x.ndim)[: x.ndim])}")'
            if not twice
            else f"write _ for one of the two {twice[0]!r}",
        )
