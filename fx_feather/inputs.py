"""What comes into a program: parameters and batches, with names, types and checks of what a caller hands over."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from . import param, tree
from .errors import BatchError, ShapeError, fail, message, raise_all
from .layout import Layout, ParamTypes, check_divides
from .mesh import Mesh
from .passes.training import Parameters
from .spec import Type


@dataclasses.dataclass(frozen=True)
class Leaves:
    """Names and types of the leaves of a batch."""

    paths: list[str]
    treedef: Any
    types: list[Type]

    def check(self, batch: Any, shapes: Sequence[tuple[int, ...]], call: str) -> list[torch.Tensor]:
        """The leaves of `batch`; BatchError lists all that differ from what was compiled for."""
        leaves, treedef = tree.flatten(batch)
        problems = []
        if treedef != self.treedef:
            have, want = tree.paths(batch), self.paths
            problems.append(
                message(
                    call=call,
                    got=f"leaves {have}",
                    number=f"missing {[p for p in want if p not in have]}, unknown {[p for p in have if p not in want]}",
                    rule="a batch has the structure of the example that the program was compiled for",
                    fix=f"a batch with the leaves {want}",
                )
            )
        else:
            for path, x, t, shape in zip(self.paths, leaves, self.types, shapes, strict=True):
                if not isinstance(x, torch.Tensor) or tuple(x.shape) != shape or x.dtype != t.dtype:
                    got = repr(Type.whole(x)) if isinstance(x, torch.Tensor) else type(x).__name__
                    wanted = repr(Type(t.dtype, shape, ((),) * len(shape)))
                    problems.append(
                        message(
                            call=f"{call}, leaf batch{path}",
                            got=got,
                            number=f"{got} is not {wanted}",
                            rule="a program is compiled for one shape and dtype of each leaf",
                            fix=f"a tensor {wanted}, or compile with such a batch as the example",
                        )
                    )
        raise_all(BatchError, problems)
        return leaves


def parameters(template: Any, mesh: Mesh, layout: Layout) -> Parameters:
    param.check_template(template, call="compile(..., template=...)")
    leaves, treedef = tree.flatten(template)
    paths = tree.paths_of(treedef)
    types: list[ParamTypes] = [
        layout.param_types(p.dim_names, p.shape, p.dtype, path) for p, path in zip(leaves, paths, strict=True)
    ]
    check_divides(((f"params{path}", t.compute) for path, t in zip(paths, types, strict=True)), mesh)
    return Parameters(paths, treedef, types, layout.precision.compute, layout.precision.reduce)


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
                problems.append(
                    message(
                        call=f"compile_step(..., accumulate={microbatches})",
                        got=f"batch{path} of shape {shape}",
                        number=f"dim {at} (batch) has size {n}, in {microbatches} microbatches",
                        rule="microbatches are equal parts of the batch",
                        fix=f"a batch of {n // microbatches * microbatches or microbatches} or "
                        f"{-(-n // microbatches) * microbatches}",
                    )
                )
            shape[at] //= microbatches
        types.append(Type(x.dtype, tuple(shape), layout.value_dims(dim_names), names=dim_names))
    raise_all(ShapeError, problems)
    what = "batch" if microbatches == 1 else f"microbatch (1 of {microbatches})"
    check_divides(((f"{what}{path}", t) for path, t in zip(paths, types, strict=True)), mesh)
    return Leaves(paths, treedef, types)


def _batch_names(leaves: list[Any], treedef: Any, dims: Any, paths: list[str]) -> list[tuple[str, ...]]:
    problems = [
        message(
            call=f"compile(..., batch=...), leaf batch{path}",
            got=type(x).__name__,
            number=f"{x!r} is not a tensor",
            rule="the example batch is a pytree of tensors; only shapes and dtypes matter",
            fix="torch.as_tensor(...)",
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
