"""Whether all of a layout acts on something: what hits nothing looks like what works, and is an error."""

import difflib
import fnmatch
from collections.abc import Collection, Mapping, Sequence

from .errors import LayoutError, message, nearest, raise_all
from .layout import DIM_NAMES, Layout
from .mesh import Mesh, as_axes


def check_used(
    layout: Layout,
    mesh: Mesh,
    params: Mapping[str, Sequence[str]],
    values: Collection[str],
    manual: Collection[str] = (),
) -> None:
    """Raises LayoutError for what acts on nothing, all at once: axes of the mesh, parts of rows, overrides.

    Of the rows of one table for one axis at least one must name a dim that there is: the package's layouts name the
    dims of many models.

    Args:
        layout: the layout.
        mesh: the ranks.
        params: the dim names of each parameter, by its path.
        values: the dim names of the batch and of every `constrain`.
        manual: axes that per-rank code of the model splits values over.
    """
    if layout.unused_ok is True:
        return
    of_params = {d for names in params.values() for d in names}
    tables = {"compute": (layout.compute, of_params | set(values))}
    tables |= {f"store.{k}": (getattr(layout.store, k), of_params) for k in ("params", "grads", "opt")}
    allowed = layout.unused_ok or ()
    problems = []
    for where, (table, there) in tables.items():
        for axis in mesh.axes:
            dims = [d for d, axes in table.items() if axis in as_axes(axes)]
            if dims and mesh[axis] > 1 and not there & set(dims) and not {axis, *dims} & set(allowed):
                problems.append(_unused(axis, mesh, where, dims, sorted(there - {"_"})))
    acted = {d for table in layout.tables() for d in table}
    for d in sorted((of_params | set(values)) - acted - {"_", *DIM_NAMES, *allowed}):
        close = difflib.get_close_matches(d, sorted(acted), n=1, cutoff=0.86)
        if close and d.rstrip("_0123456789") != close[0]:
            problems.append(_misspelt(d, close[0], [path for path, names in params.items() if d in names]))
    named = {a for t in layout.tables() for axes in t.values() for a in as_axes(axes)}
    for axis in mesh.axes:
        if mesh[axis] > 1 and axis not in {*named, *allowed, *manual}:
            problems.append(_unused(axis, mesh, "", [], []))
    for pattern in layout.overrides:
        hit = any(fnmatch.fnmatchcase(path, pattern.replace("[", "[[]")) for path in params)
        if not hit and pattern not in allowed:
            problems.append(
                message(
                    call=f"Layout(overrides={{{pattern!r}: ...}})",
                    got=f"{len(params)} parameters",
                    number="no path of a parameter matches the pattern",
                    rule="an override is for the parameters whose path matches it",
                    fix=nearest(pattern, list(params)),
                )
            )
    raise_all(LayoutError, problems)


def _misspelt(d: str, close: str, paths: Sequence[str]) -> str:
    return message(
        call="compile(..., layout=...)",
        got=f"a dim named {d!r} of " + (", ".join(f"params{p}" for p in paths[:3]) or "the batch or a constrain"),
        number=f"no layout acts on {d!r}, and it is all but {close!r}",
        rule="a dim is split by its name: one that is misspelt stays whole without a word",
        fix=f"{close!r} in its place, or Layout(..., unused_ok=({d!r},)) if that is meant",
    )


def _unused(axis: str, mesh: Mesh, where: str, dims: Sequence[str], there: Sequence[str]) -> str:
    close = [c for d in dims for c in difflib.get_close_matches(d, there, n=1, cutoff=0.7)]
    what = (
        f"{where} splits {', '.join(dims)} over {axis!r}" if dims else f"no row of the layout names the axis {axis!r}"
    )
    return message(
        call=f"compile(..., layout=...) on {mesh!r}",
        got=what,
        number=f"none of these dims is there; the dims are {', '.join(there) or 'none'}"
        if dims
        else f"its {mesh[axis]} ranks would all compute the same",
        rule="each axis splits something in each table that names it, or its ranks do each other's work; the "
        f"layouts of this package act on the dims {', '.join(DIM_NAMES)}",
        fix=f"{dims[0]!r} in the place of {close[0]!r} in the ff.Param, batch_dims or constrain"
        if close
        else f"Layout(..., unused_ok=({axis!r},)) if that is meant, or a mesh without {axis!r}",
    )
