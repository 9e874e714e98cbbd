"""A layout: a small table from dim names to mesh axes, the only place where a parallelism is chosen."""

import dataclasses
import fnmatch
import itertools
from collections.abc import Iterable, Mapping, Sequence

import torch

from .errors import LayoutError, ShapeError, fail, message, nearest, raise_all
from .mesh import Axes, Mesh, as_axes
from .spec import Dims, Type, local_size

Table = Mapping[str, Axes]

#: Dim names that models of this package use. A layout may name these even if a model lacks them.
DIM_NAMES = (
    "batch",
    "seq",
    "residual_seq",
    "kv_seq",
    "embed",
    "latent",
    "heads",
    "kv_heads",
    "head_dim",
    "mlp",
    "vocab",
    "expert",
    "expert_mlp",
)

#: Dims whose values may be split into parts with padding; all others must divide.
PADDED_DIMS = frozenset({"vocab"})

#: Dims that may have fewer elements than an axis has ranks: each serves several ranks, which then hold it whole.
SHARED_DIMS = ("kv_heads",)


def _kind(what: str, value: object, kind: type, fix: str) -> None:
    if not isinstance(value, kind):
        fail(
            LayoutError,
            call=f"Layout({what}=...)",
            got=repr(value),
            number=f"{type(value).__name__} is not {kind.__name__}",
            rule="a layout is made of tables from dim names to axes, and of layouts",
            fix=fix,
        )


def _table(table: Table, where: str) -> dict[str, tuple[str, ...]]:
    _kind(where, table, Mapping, f'{where}={{"embed": "dp"}}')
    problems = []

    def refuse(dim: str, axes: object, number: str, rule: str, fix: str) -> None:
        problems.append(
            message(
                call=f"Layout({where}=...)", got=f"{dim} -> {axes!r}", number=number, rule=rule, fix=f"{dim!r}: {fix}"
            )
        )

    for dim, axes in table.items():
        parts = tuple(axes) if isinstance(axes, tuple | list) else () if axes is None else (axes,)
        for a in parts:
            if not isinstance(a, str):
                rule = "a row is a dim name and one or more names of mesh axes"
                refuse(dim, axes, f"{a!r} is no name of a mesh axis", rule, '"tp"')
        for a in dict.fromkeys(parts):
            if parts.count(a) > 1:
                number = f"axis {a!r} is used {parts.count(a)} times for dim {dim!r}"
                rule = "a mesh axis splits a dim once: its ranks hold one part each"
                refuse(dim, axes, number, rule, repr(tuple(dict.fromkeys(parts))))
    raise_all(LayoutError, problems)
    return {dim: as_axes(axes) for dim, axes in table.items()}


def _join(left: Table, right: Table, where: str) -> dict[str, tuple[str, ...]]:
    dims = list(dict.fromkeys([*left, *right]))
    return _table({d: as_axes(left.get(d)) + as_axes(right.get(d)) for d in dims}, where)


@dataclasses.dataclass(frozen=True)
class Store:
    """How parameters, their accumulated gradients and the optimizer's state rest between uses.

    Each is a table from dim name to mesh axes, which split the dim further than `compute` does.

    >>> Store(opt={"embed": "dp"})
    Store(params={}, grads={}, opt={'embed': ('dp',)})
    """

    params: Table = dataclasses.field(default_factory=dict)
    grads: Table = dataclasses.field(default_factory=dict)
    opt: Table = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for field in ("params", "grads", "opt"):
            object.__setattr__(self, field, _table(getattr(self, field), f"store.{field}"))

    def __or__(self, other: "Store") -> "Store":
        return Store(*(_join(getattr(self, f), getattr(other, f), f"store.{f}") for f in ("params", "grads", "opt")))


@dataclasses.dataclass(frozen=True)
class Precision:
    """dtypes of one step: of values while computing (and gathering), and of gradients while reduced.

    `None` keeps the parameters' own dtype.
    """

    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None

    def __post_init__(self) -> None:
        for field in ("compute", "reduce"):
            value = getattr(self, field)
            if value is not None:
                _kind(f"precision.{field}", value, torch.dtype, f"ff.Precision({field}=torch.bfloat16)")


@dataclasses.dataclass(frozen=True)
class ParamTypes:
    """The types of one parameter: in use, at rest, its accumulated gradient, its optimizer state."""

    compute: Type
    store: Type
    grads: Type
    opt: Type


@dataclasses.dataclass(frozen=True)
class Layout:
    """A table from dim names to mesh axes: `compute` for values in use, `store` for what rests between uses.

    Rows are in order of priority: an axis splits at most one dim of a tensor, and earlier rows win. Layouts compose by
    `|`: the axes of a dim that both name are joined, the left ones major.

    Args:
        compute: dim name to axes that split values (activations and parameters) while used.
        store: further splits of parameters, gradients and optimizer state at rest.
        overrides: for parameters whose path matches the pattern (fnmatch, such as `*['router']*`), the layout that
            holds instead of this one. Composed by `|`, the other side's rows are joined to it.
        precision: dtypes of compute and of gradient reduction.
        unused_ok: names of axes, dims and patterns that may act on nothing; True for all. Otherwise that is an error
            when something is compiled, since a layout that does nothing looks like one that works.

    Raises:
        LayoutError: an axis used twice for one dim.

    >>> Layout(compute={"batch": "replica"}) | Layout(compute={"batch": "shard"}, store=Store(opt={"embed": "shard"}))
    Layout(compute={'batch': ('replica', 'shard')}, store=Store(params={}, grads={}, opt={'embed': ('shard',)}))
    """

    compute: Table = dataclasses.field(default_factory=dict)
    store: Store = dataclasses.field(default_factory=Store)
    overrides: Mapping[str, "Layout"] = dataclasses.field(default_factory=dict)
    precision: Precision = dataclasses.field(default_factory=Precision)
    unused_ok: bool | tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _kind("store", self.store, Store, 'store=ff.Store(params={"embed": "dp"})')
        _kind("precision", self.precision, Precision, "precision=ff.Precision(compute=torch.bfloat16)")
        for layout in self.overrides.values():
            _kind("overrides", layout, Layout, "overrides={\"*['router']*\": ff.Layout()}")
        object.__setattr__(self, "compute", _table(self.compute, "compute"))
        raise_all(
            LayoutError,
            [
                message(
                    call=f"Layout(overrides={{{pattern!r}: ...}})",
                    got=repr(layout),
                    number="the layout of some parameters sets a precision or overrides of its own",
                    rule="an override is the tables of the parameters that match; precision is one for the whole step",
                    fix=f"overrides={{{pattern!r}: Layout(compute=..., store=...)}}, precision beside it",
                )
                for pattern, layout in self.overrides.items()
                if layout.overrides or layout.precision != Precision()
            ],
        )

    def __or__(self, other: "Layout") -> "Layout":
        mine, theirs = self.precision, other.precision
        # A parameter that one side treats apart still gets the rows of the other side.
        left, right = self._without_overrides(), other._without_overrides()
        overrides = {
            pattern: self.overrides.get(pattern, left) | other.overrides.get(pattern, right)
            for pattern in dict.fromkeys([*self.overrides, *other.overrides])
        }
        return Layout(
            compute=_join(self.compute, other.compute, "compute"),
            store=self.store | other.store,
            overrides=overrides,
            precision=Precision(theirs.compute or mine.compute, theirs.reduce or mine.reduce),
            unused_ok=_either(self.unused_ok, other.unused_ok),
        )

    def _without_overrides(self) -> "Layout":
        return Layout(self.compute, self.store)

    def __repr__(self) -> str:
        parts = [f"compute={dict(self.compute)}", f"store={self.store}"]
        if self.overrides:
            parts.append(f"overrides={dict(self.overrides)}")
        if self.precision != Precision():
            parts.append(f"precision={self.precision}")
        if self.unused_ok:
            parts.append(f"unused_ok={self.unused_ok}")
        return f"Layout({', '.join(parts)})"

    def tables(self) -> list[Table]:
        """All tables, those of overrides too."""
        own: list[Table] = [self.compute, self.store.params, self.store.grads, self.store.opt]
        return own + [t for layout in self.overrides.values() for t in layout.tables()]

    def check_axes(self, mesh: Mesh) -> None:
        """Raises LayoutError for axes that the mesh lacks, all at once."""
        rows = {
            (dim, a): axes for t in self.tables() for dim, axes in t.items() for a in as_axes(axes) if a not in mesh
        }
        raise_all(
            LayoutError,
            [
                message(
                    call=f"layout row {dim!r} -> {as_axes(axes)}",
                    got=f"axis {a!r} on {mesh!r}",
                    number=f"{a!r} is not one of the axes {list(mesh.axes)}",
                    rule="a layout names axes of the mesh it is used on",
                    fix=f"Mesh(..., {a}=2), or {nearest(a, mesh.axes)}",
                )
                for (dim, a), axes in rows.items()
            ],
        )

    def check_dims(self, names: Iterable[str]) -> None:
        """Raises LayoutError for dims that neither the model (`names`) nor this package has, all at once."""
        known = sorted({*names, *DIM_NAMES} - {"_"})
        rows = {dim: axes for t in self.tables() for dim, axes in t.items() if dim not in known}
        raise_all(
            LayoutError,
            [
                message(
                    call=f"layout row {dim!r} -> {as_axes(axes)}",
                    got=f"dim name {dim!r}",
                    number=f"no parameter, batch leaf or constrain of the model has a dim {dim!r}",
                    rule="a layout splits dims that the model names",
                    fix=nearest(dim, known),
                )
                for dim, axes in rows.items()
            ],
        )

    def fitted(self, mesh: Mesh, params: Iterable[tuple[Sequence[str], Sequence[int]]]) -> "Layout":
        """This layout with the rows of `kv_heads` shortened to the axes that so many heads can be split over.

        Of two key and value heads on four tensor-parallel ranks each serves the query heads of two, so that all ranks
        hold both, and their gradients are summed. Numbers of which none divides the other are left for `check_divides`.

        Args:
            mesh: the ranks.
            params: dim names and shape of each parameter.
        """
        sizes = {(d, n) for names, shape in params for d, n in zip(names, shape, strict=True) if d in SHARED_DIMS}
        compute = dict(self.compute)
        for dim, n in sizes:
            axes = as_axes(compute.get(dim))
            if axes and n and mesh.count(axes) % n == 0:
                while n % mesh.count(axes):
                    axes = axes[:-1]
                compute[dim] = axes
        overrides = {pattern: layout.fitted(mesh, params) for pattern, layout in self.overrides.items()}
        return dataclasses.replace(self, compute=compute, overrides=overrides) if sizes else self

    def value_dims(self, names: Iterable[str]) -> Dims:
        """For a value with these dim names, the axes that split each dim while it is used."""
        names = tuple(names)
        return _assign(((),) * len(names), names, self.compute)

    def at(self, path: str) -> "Layout":
        """The layout of the parameter at a path: that of the first override whose pattern matches, or this one."""
        for pattern, layout in self.overrides.items():
            # fnmatch reads [...] as a set of characters; a path has brackets of its own.
            if fnmatch.fnmatchcase(path, pattern.replace("[", "[[]")):
                return layout.at(path)
        return self

    def param_types(
        self, dims: tuple[str, ...], shape: tuple[int, ...], dtype: torch.dtype, path: str = ""
    ) -> ParamTypes:
        """The types of a parameter in use, at rest, of its gradient and of its optimizer state."""
        own = self.at(path)
        if own is not self:
            return own.param_types(dims, shape, dtype, path)
        compute = self.value_dims(dims)

        def typed(split: Dims) -> Type:
            return Type(dtype, shape, split, names=dims)

        # A gradient and an optimizer state are parts of the part that rests, so that an update takes its own without
        # communication: of `zero1(a) | fsdp(b)` the state is split by b, then by a.
        store = _assign(compute, dims, self.store.params)
        grads = _nested(_assign(compute, dims, self.store.grads), store)
        opt = _nested(_assign(compute, dims, self.store.opt), _nested(grads, store))
        return ParamTypes(*(typed(d) for d in (compute, store, grads, opt)))


def _either(a: bool | tuple[str, ...], b: bool | tuple[str, ...]) -> bool | tuple[str, ...]:
    if a is True or b is True:
        return True
    return tuple(dict.fromkeys([*(a or ()), *(b or ())]))


def _assign(start: Dims, names: tuple[str, ...], table: Table) -> Dims:
    out, used = list(start), {a for d in start for a in d}
    for dim, axes in table.items():
        if dim in names:
            free = tuple(a for a in as_axes(axes) if a not in used)
            out[names.index(dim)] += free
            used.update(free)
    return tuple(out)


def _nested(dims: Dims, outer: Dims) -> Dims:
    """The same splits, those axes first that `outer` has, in its order."""
    return tuple(
        (*(a for a in first if a in own), *(a for a in own if a not in first))
        for own, first in zip(dims, outer, strict=True)
    )


def undivided(t: Type, mesh: Mesh, what: str) -> list[str]:
    """Messages for the dims of a value in use that the mesh splits unevenly, other than those that may be padded."""
    names = t.names or ("?",) * len(t.shape)
    out = []
    for i, (n, axes, name) in enumerate(zip(t.shape, t.dims, names, strict=True)):
        k = mesh.count(axes)
        if n % k == 0 or (name in PADDED_DIMS and local_size(n, axes, mesh) > 0):
            continue
        below, above = n // k * k, -(-n // k) * k
        sizes = f"{above}" if below == 0 else f"{below} or {above}"
        over = f"axis {axes[0]!r} has" if len(axes) == 1 else f"axes {list(axes)} have"
        out.append(
            message(
                call=f"split of {what}, dims {' '.join(names)!r}",
                got=f"{t} on {mesh!r}",
                number=f"dim {i} ({name}) has size {n}, {over} size {k}",
                rule="the ranks of an axis hold equal parts of a value in use (only "
                + ", ".join(sorted(PADDED_DIMS))
                + " is padded)",
                fix=f"{name} of size {sizes}, or an axis whose size divides {n}, or a layout without the row {name!r}",
            )
        )
    return out


def check_divides(types: Iterable[tuple[str, Type]], mesh: Mesh) -> None:
    """Raises ShapeError for every value in `types` that the mesh splits unevenly."""
    raise_all(ShapeError, [m for what, t in types for m in undivided(t, mesh, what)])


def check_rest(types: Iterable[tuple[str, ParamTypes]]) -> None:
    """Raises LayoutError for parameters that rest in parts which an update can't bring together, all at once."""
    problems = []
    for what, t in types:
        resting = {"params": t.store, "grads": t.grads, "opt": t.opt}
        for (one, a), (two, b) in itertools.combinations(resting.items(), 2):
            apart = _apart(a, b)
            if not apart:
                continue
            problems.append(
                message(
                    call=f"update of {what}, dims {' '.join(a.names or ())!r}",
                    got=f"store.{one} gives {a}\nstore.{two} gives {b}",
                    number=apart,
                    rule="an update takes its own part of what is split less: in all tables of Store an axis splits "
                    "the same dim, and the axes of a dim come in the same order",
                    fix=f"the same rows in Store({one}=..., {two}=...), or one of the two without them",
                )
            )
    raise_all(LayoutError, problems)


def _apart(a: Type, b: Type) -> str:
    """Why neither of two types of one value is part of the other on some dim; nothing if all fits."""
    names = a.names or ("?",) * len(a.dims)
    of_a, of_b = ({axis: i for i, axes in enumerate(t.dims) for axis in axes} for t in (a, b))
    for axis in of_a.keys() & of_b.keys():
        if of_a[axis] != of_b[axis]:
            return f"axis {axis!r} splits {names[of_a[axis]]} in the one and {names[of_b[axis]]} in the other"
    for name, x, y in zip(names, a.dims, b.dims, strict=True):
        k = min(len(x), len(y))
        if x[:k] != y[:k]:
            return f"{name} is split by {x} in the one and by {y} in the other"
    return ""
