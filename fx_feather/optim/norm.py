"""The global norm of a pytree, and clipping by it."""

import math
from typing import Any

import torch
from torch import Tensor

from fx_feather import tree
from fx_feather.errors import OptimizerError
from fx_feather.settings import check, is_finite, text
from fx_feather.trace import Block

from . import leaf
from .transform import Factor, Transform, device, multiplied

_AT_ONCE = 4  # parts of a norm that are combined by one call


def global_norm(values: tree.Tree, ord: float = 2) -> Tensor:
    """The norm of all elements of all leaves as one vector, a 0-dim tensor in float32 or wider.

    Args:
        values: a pytree of tensors.
        ord: 2, or `math.inf` for the largest absolute value.

    Raises:
        OptimizerError: another `ord`.

    >>> global_norm({"a": torch.tensor([3.0]), "b": [torch.tensor([[4.0]])]})
    tensor(5.)
    """
    check(
        OptimizerError,
        "global_norm",
        {"ord": ord},
        [("ord", ord in (2, math.inf), "the norms are 2 and math.inf", "ord=2")],
    )
    if ord == 2:
        return scaled_norm(values, None)
    leaves = _not_empty(values)
    if not leaves:
        return torch.zeros(())
    return leaf.largest(*_folded(leaf.largest, leaves, leaf.max_abs.each([(x,) for x in leaves])))


def scaled_norm(grads: tree.Tree, factor: Factor) -> Tensor:
    """The global norm of a factor times the gradients; with a factor, in float64, so that none overflows."""
    leaves = _not_empty(grads)
    if not leaves:
        return torch.zeros(())
    return leaf.root_of_sum(*_folded(leaf.total, leaves, leaf.sum_squares.each([(x, factor) for x in leaves])))


def _not_empty(values: tree.Tree) -> list[Tensor]:
    return [x for x in tree.leaves(values) if x.numel()]


def _folded(combine: Block, leaves: list[Tensor], parts: list[Tensor]) -> list[Tensor]:
    """Combines the parts of leaves that are alike a few at a time: no function takes more in a deeper model."""
    alike: dict[Any, list[Tensor]] = {}
    for x, part in zip(leaves, parts, strict=True):
        alike.setdefault((x.shape, x.dtype), []).append(part)
    out = []
    for group in alike.values():
        while full := len(group) // _AT_ONCE * _AT_ONCE:
            rows = [tuple(group[i : i + _AT_ONCE]) for i in range(0, full, _AT_ONCE)]
            group = combine.each(rows) + group[full:]
        out += group
    return out


def clip_by_global_norm(max_norm: float) -> Transform:
    """Scales all gradients by one factor, so that their global norm is at most `max_norm` (as torch's clip_grad_norm_).

    Its state is `{"norm": float[]}`: the norm before clipping of the last update, in float32 or wider. With
    `max_norm=math.inf` it only reports.

    Raises:
        OptimizerError: a maximum that is not positive.
        NonFiniteError: in a compiled step, a norm of another transform's updates that is not finite; before the update.

    >>> clip, params = clip_by_global_norm(1.0), {"w": torch.zeros(2)}
    >>> clip.update({"w": torch.tensor([3.0, 4.0])}, clip.init(params), params)
    ({'w': tensor([0.6000, 0.8000])}, {'norm': tensor(5.)})
    """
    ok = max_norm == math.inf or is_finite(max_norm, above=0)
    check(
        OptimizerError,
        "clip_by_global_norm",
        {"max_norm": max_norm},
        [("max_norm", ok, "the largest norm is positive; math.inf never clips", "max_norm=1.0")],
    )

    def init(params: tree.Tree) -> tree.Tree:
        leaves = tree.leaves(params)
        dtype = leaf.widest(p.dtype for p in leaves)
        return {"norm": torch.zeros((), dtype=dtype, device=device(leaves))}

    def update(grads: tree.Tree, state: tree.Tree, params: tree.Tree) -> tuple[tree.Tree, tree.Tree]:
        norm = scaled_norm(grads, torch.ones((), dtype=torch.float64, device=device(tree.leaves(grads))))
        return multiplied(grads, clipping(norm)), {"norm": norm.to(state["norm"].dtype)}

    def clipping(norm: Tensor) -> Tensor:
        return (max_norm / (norm + 1e-6)).clamp(max=1.0)

    def rescale(grads: tree.Tree, state: tree.Tree, factor: Factor) -> tuple[Factor, tree.Tree]:
        if factor is None:
            # Updates of another transform: unlike that of gradients, nobody has looked at their norm yet.
            factor = torch.ones((), dtype=torch.float64, device=device(tree.leaves(grads)))
            norm = leaf.finite(scaled_norm(grads, factor), f"{what}: the norm of what it clips")
        else:
            norm = scaled_norm(grads, factor)
        return factor * clipping(norm), {"norm": norm.to(state["norm"].dtype)}

    what = text("clip_by_global_norm", {"max_norm": max_norm})
    return Transform(init, update, what, rescale=rescale)
