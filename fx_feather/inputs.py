"""What comes into a program: parameters and batches, with names, types and checks of what a caller hands over."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from . import tree
from .errors import BatchError, ShapeError, fail, message, raise_all
from .layout import Layout, ParamTypes, check_divides, undivided
from .mesh import Mesh
from .passes.training import Parameters
from .spec import Type


@dataclasses.dataclass(frozen=True)
class Leaves:
    """Names and types of the leaves of a batch."""

    paths: list[str]
    treedef: Any
    types: list[Type]

    def check(
        self, batch: Any, shapes: Sequence[tuple[int, ...]], call: str, whole: Sequence[tuple[int, ...]] = ()
    ) -> list[torch.Tensor]:
        """The leaves of `batch`; BatchError lists all that differ from what was compiled for.

        `whole` are the whole shapes where `shapes` are those of local parts.
        """
        leaves, treedef = tree.flatten(batch)
        paths, problems = tree.paths(batch), []
        if treedef != self.treedef:
            missing, unknown = [p for p in self.paths if p not in paths], [p for p in paths if p not in self.paths]
            number = f"missing {missing}, unknown {unknown}"
            if not missing and not unknown:
                number = f"the containers are {treedef}, not {self.treedef}"
            problems.append(
                message(
                    call=call,
                    got=f"leaves {paths}",
                    number=number,
                    rule="a batch has the structure of the example that the program was compiled for",
                    fix=f"a batch with the leaves {self.paths}",
                )
            )
        given = dict(zip(paths, leaves, strict=True))
        for i, (path, t, shape) in enumerate(zip(self.paths, self.types, shapes, strict=True)):
            x = given.get(path)
            if path not in given or (isinstance(x, torch.Tensor) and tuple(x.shape) == shape and x.dtype == t.dtype):
                continue
            got = repr(Type.whole(x)) if isinstance(x, torch.Tensor) else type(x).__name__
            wanted = repr(Type(t.dtype, shape, ((),) * len(shape)))
            fix = f"a tensor {wanted}, or compile with such a batch as the example"
            if whole and isinstance(x, torch.Tensor) and tuple(x.shape) == whole[i]:
                fix = "this rank's part of the batch, as step.shard(batch) gives it"
            problems.append(
                message(
                    call=f"{call}, leaf batch{path}",
                    got=got,
                    number=f"{got} is not {wanted}",
                    rule="a program is compiled for one shape and dtype of each leaf",
                    fix=fix,
                )
            )
        raise_all(BatchError, problems)
        return leaves


def parameters(template: Any, mesh: Mesh, layout: Layout) -> Parameters:
    leaves, treedef = tree.flatten(template)
    paths: Sequence[str | None] = tree.paths_of(treedef) if layout.overrides else [None] * len(leaves)
    # Parameters that are alike share one object, so that the passes tell at a glance that they are.
    known: dict[Any, ParamTypes] = {}
    types: list[ParamTypes] = []
    for p, path in zip(leaves, paths, strict=True):
        own = layout if path is None else layout.at(path)
        key = (id(own), p.dims, p.shape, p.dtype)
        if key not in known:
            known[key] = own.param_types(p.dim_names, p.shape, p.dtype)
        types.append(known[key])
    params = Parameters(treedef, types, layout.precision.compute, layout.precision.reduce)
    if any(undivided(t.compute, mesh, "") for t in known.values()):
        check_divides(((f"params{path}", t.compute) for path, t in zip(params.paths, types, strict=True)), mesh)
    return params


def batch_leaves(batch: Any, dims: Any, layout: Layout, mesh: Mesh, microbatches: int) -> Leaves:
    leaves, treedef = tree.flatten(batch)
    paths = tree.paths_of(treedef)
    names = _batch_names(leaves, treedef, dims, paths)
    types, problems = [], []
    for path, x, dim_names in zip(paths, leaves, names, strict=True):
        shape = list(x.shape)
        if "batch" in dim_names:
            at = dim_names.index("batch")
            if shape[at] % microbatches:
                n = shape[at]
                # A microbatch must also be divided by the ranks that split it.
                whole = microbatches * mesh.count(layout.value_dims(dim_names)[at])
                problems.append(
                    message(
                        call=f"compile_step(..., accumulate={microbatches})",
                        got=f"batch{path} of shape {shape}",
                        number=f"dim {at} (batch) has size {n}, in {microbatches} microbatches",
                        rule="microbatches are equal parts of the batch",
                        fix=f"a batch of {n // whole * whole or whole} or {-(-n // whole) * whole}",
                    )
                )
            shape[at] //= microbatches
        types.append(Type(x.dtype, tuple(shape), layout.value_dims(dim_names), names=dim_names))
    raise_all(ShapeError, problems)
    part = "" if microbatches == 1 else f"a microbatch, a batch being {microbatches} of them, of "
    check_divides(((f"{part}batch{path}", t) for path, t in zip(paths, types, strict=True)), mesh)
    return Leaves(paths, treedef, types)


def _batch_names(leaves: list[Any], treedef: Any, dims: Any, paths: list[str]) -> list[tuple[str, ...]]:
    problems = [
        message(
            call=f"compile(..., batch=...), leaf batch{path}",
            got=type(x).__name__,
            number=f"{x!r} is not a tensor",
            rule="the example batch is a pytree of tensors; only shapes and dtypes matter",
            fix=tree.as_node(x, "torch.as_tensor(...)"),
        )
        for path, x in zip(paths, leaves, strict=True)
        if not isinstance(x, torch.Tensor)
    ]
    raise_all(ShapeError, problems)
    given = [dims] * len(leaves) if isinstance(dims, str) else tree.flatten(dims)[0] if dims is not None else None
    if given is None:
        return [(("batch", "seq") + ("_",) * x.ndim)[: x.ndim] for x in leaves]
    if not isinstance(dims, str) and tree.structure(dims) != treedef:
        fail(
            ShapeError,
            call="compile(..., batch_dims=...)",
            got=f"leaves {tree.paths(dims)}",
            number=f"the batch has the leaves {paths}",
            rule="batch_dims is one string for all leaves, or a pytree like the batch with one string a leaf",
            fix='batch_dims="batch seq"',
        )
    raise_all(
        ShapeError,
        [
            message(
                call=f"compile(..., batch_dims=...), leaf batch{path}",
                got=repr(d),
                number=f"{d!r} is not a string" if not isinstance(d, str) else f"{_twice(d)!r} is named twice",
                rule="each dim of a batch leaf has one name of its own, `_` for one that no layout splits",
                fix='"batch seq", or "" for a leaf without dims',
            )
            for path, d in zip(paths, given, strict=True)
            if not isinstance(d, str) or _twice(d)
        ],
    )
    names = [tuple(d.split()) for d in given]
    raise_all(
        ShapeError,
        [
            message(
                call=f"compile(..., batch_dims=...), leaf batch{path}",
                got=f"{' '.join(n)!r} for shape {list(x.shape)}",
                number=f"{len(n)} names for {x.ndim} dims",
                rule="each dim of a batch leaf has one name",
                fix=f"{' '.join((*n, *['_'] * x.ndim)[: x.ndim])!r}",
            )
            for path, x, n in zip(paths, leaves, names, strict=True)
            if len(n) != x.ndim
        ],
    )
    return names


def _twice(dims: str) -> str:
    names = dims.split()
    return next((n for n in names if n != "_" and names.count(n) > 1), "")
