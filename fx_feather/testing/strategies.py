"""Hypothesis strategies: meshes, layouts, specs and batches of any kind, which shrink to the smallest of them."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .. import tree
from ..errors import FeatherError, fail
from ..layout import PADDED_DIMS, Layout, Store
from ..mesh import Mesh, as_axes
from ..spec import P

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

Kind = Callable[[str], Layout]


def _zero(stage: int) -> Kind:
    def kind(axis: str) -> Layout:
        row = {"embed": axis, "latent": axis}
        tables = [row if stage >= least else {} for least in (3, 2, 1)]
        return Layout(compute={"batch": axis}, store=Store(*tables))

    return kind


def _tensor(*dims: str) -> Kind:
    return lambda axis: Layout(compute=dict.fromkeys(dims, axis))


#: What one mesh axis may be used for, by the names of the layouts package; each takes the axis.
KINDS: Mapping[str, Kind] = {
    "single": lambda axis: Layout(),
    "ddp": _zero(0),
    "zero1": _zero(1),
    "zero2": _zero(2),
    "fsdp": _zero(3),
    "tp": _tensor("heads", "kv_heads", "mlp", "vocab"),
    "tp_sp": _tensor("heads", "kv_heads", "mlp", "vocab", "residual_seq"),
}


def _strategies() -> Any:
    try:
        import hypothesis.strategies
    except ImportError:
        fail(
            FeatherError,
            call="fx_feather.testing: a strategy",
            got="no package hypothesis in this environment",
            number="1 package is missing: hypothesis",
            rule="strategies are for tests alone, so hypothesis is no dependency of fx_feather itself",
            fix="pip install hypothesis",
        )
    return hypothesis.strategies


def meshes(max_size: int = 8, axes: Sequence[str] = ("dp", "tp"), min_size: int = 1) -> "SearchStrategy[Mesh]":
    """Meshes of some of the axes, in their order, with at most `max_size` ranks; they shrink to one rank.

    Args:
        max_size: ranks at most.
        axes: names; each is there or not.
        min_size: ranks at least.

    >>> from hypothesis import find
    >>> find(meshes(), lambda mesh: mesh.size >= 4 and "tp" in mesh)
    Mesh(tp=4)
    """
    st = _strategies()
    choices = []
    for k in range(len(axes) + 1):
        for names in itertools.combinations(axes, k):
            ranges = [range(2, max_size + 1)] * k
            choices += [
                Mesh(**dict(zip(names, sizes, strict=True)))
                for sizes in itertools.product(*ranges)
                if min_size <= math.prod(sizes) <= max_size
            ]
    return st.sampled_from(sorted(choices, key=lambda m: (m.size, len(m.axes))))


def compositions(
    mesh: Mesh, kinds: Mapping[str, Kind] = KINDS, sizes: Mapping[str, int] | None = None
) -> dict[str, Layout]:
    """Every way to use each axis of a mesh for one kind, by a name such as `fsdp@dp | tp@tp`.

    Args:
        mesh: the ranks.
        kinds: what an axis may be used for: functions of the axis, such as `{"fsdp": layouts.fsdp}`.
        sizes: of dims of the model and batch, by name. Layouts that would split one of them unevenly are left out.

    >>> list(compositions(Mesh(a=2, b=2), {"ddp": KINDS["ddp"], "tp": KINDS["tp"]}, {"heads": 2}))
    ['ddp@a | ddp@b', 'ddp@a | tp@b', 'tp@a | ddp@b']
    """
    out = {}
    for names in itertools.product(kinds, repeat=len(mesh.axes)):
        layout = Layout()
        for name, axis in zip(names, mesh.axes, strict=True):
            layout = layout | kinds[name](axis)
        used = {a for table in layout.tables() for axes in table.values() for a in as_axes(axes)}
        if not used.issuperset(mesh.axes):  # a kind may leave its axis without work
            layout = dataclasses.replace(layout, unused_ok=tuple(a for a in mesh.axes if a not in used))
        uneven = [
            dim
            for dim, axes in layout.compute.items()
            if dim not in PADDED_DIMS and (sizes or {}).get(dim, 0) % mesh.count(as_axes(axes))
        ]
        if not uneven:
            text = " | ".join(f"{name}@{axis}" for name, axis in zip(names, mesh.axes, strict=True))
            out[text or "single"] = layout
    return out


def layouts(
    mesh: Mesh, kinds: Mapping[str, Kind] = KINDS, sizes: Mapping[str, int] | None = None
) -> "SearchStrategy[Layout]":
    """Layouts that use each axis of `mesh` for one kind; arguments as for `compositions`.

    >>> from hypothesis import find
    >>> find(layouts(Mesh(dp=2)), lambda layout: layout.store.params).compute
    {'batch': ('dp',)}
    """
    return _strategies().sampled_from(list(compositions(mesh, kinds, sizes).values()))


def parallelisms(
    max_size: int = 8,
    axes: Sequence[str] = ("dp", "tp"),
    kinds: Mapping[str, Kind] = KINDS,
    sizes: Mapping[str, int] | None = None,
) -> "SearchStrategy[tuple[Mesh, Layout]]":
    """Pairs of a mesh and a layout for it; arguments as for `meshes` and `compositions`.

    >>> from hypothesis import find
    >>> mesh, layout = find(parallelisms(), lambda pair: "mlp" in pair[1].compute)
    >>> mesh, layout.compute["mlp"]
    (Mesh(dp=2), ('dp',))
    """
    st = _strategies()
    of_mesh = meshes(max_size, axes).filter(lambda mesh: compositions(mesh, kinds, sizes))
    return of_mesh.flatmap(lambda mesh: st.tuples(st.just(mesh), layouts(mesh, kinds, sizes)))


def specs(shape: Sequence[int], mesh: Mesh, partial: bool = True) -> "SearchStrategy[P]":
    """Specs of a tensor: each axis of `mesh` splits one of its dims, or none, or leaves a pending sum.

    >>> from hypothesis import find
    >>> find(specs((4, 6), Mesh(dp=2, tp=2)), lambda spec: spec.partial and spec.dims[1])
    P(None, 'dp', partial='tp')
    """
    st = _strategies()
    places: list[Any] = [None, *range(len(shape)), *(["partial"] if partial else [])]

    def spec(choice: tuple[Any, ...]) -> P:
        at = dict(zip(mesh.axes, choice, strict=True))
        dims = [tuple(a for a in mesh.axes if at[a] == d) or None for d in range(len(shape))]
        return P(*dims, partial=tuple(a for a in mesh.axes if at[a] == "partial") or None)

    return st.tuples(*[st.sampled_from(places)] * len(mesh.axes)).map(spec)


def batches(example: Any, ignored: Mapping[str, int] | None = None) -> "SearchStrategy[Any]":
    """Batches like an example: floats are normal, integers lie between the example's smallest and largest.

    Args:
        example: a pytree of tensors.
        ignored: for leaves, by their key in the example, the label that does not count. It is set unevenly: in some
            rows nowhere, in some at places, in some all along, but never in all rows.

    >>> from hypothesis import find
    >>> like = {"x": torch.zeros(2, 3), "label": torch.tensor([0, 9])}
    >>> find(batches(like, {"label": -100}), lambda batch: -100 in batch["label"])["label"].min()
    tensor(-100)
    """
    st = _strategies()
    wanted = {f"[{key!r}]": value for key, value in (ignored or {}).items()}
    leaves, treedef = tree.flatten(example)
    paths = tree.paths_of(treedef)

    def one(drawn: tuple[int, list[str], int]) -> Any:
        seed, rows, counted = drawn
        g = torch.Generator().manual_seed(seed)
        out = []
        for path, like in zip(paths, leaves, strict=True):
            x = _random(like, g)
            for row in range(len(x) if path in wanted else 0):
                kind = "none" if row == counted % len(x) else rows[row % len(rows)]
                if kind == "all":
                    x[row] = wanted[path]
                elif kind == "some":
                    x[row] = torch.where(torch.rand(x[row].shape, generator=g) < 0.5, wanted[path], x[row])
            out.append(x)
        return tree.unflatten(treedef, out)

    kinds = st.lists(st.sampled_from(["none", "some", "all"]), min_size=1, max_size=8)
    return st.tuples(st.integers(0, 2**31), kinds, st.integers(0, 7)).map(one)


def _random(like: torch.Tensor, g: torch.Generator) -> torch.Tensor:
    if like.is_floating_point():
        return torch.randn(like.shape, generator=g, dtype=torch.float64).to(like.dtype)
    low, high = (int(like.min()), int(like.max())) if like.numel() else (0, 0)
    return torch.randint(low, high + 1, like.shape, generator=g).to(like.dtype)
