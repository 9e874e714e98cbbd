"""The global norm of a pytree, and clipping by it."""

import math

import torch
from torch import Tensor

from fx_feather import tree
from fx_feather.errors import OptimizerError
from fx_feather.settings import check, is_finite, text

from . import leaf
from .transform import Transform, device, scaled


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
    leaves = [x for x in tree.leaves(values) if x.numel()]
    if not leaves:
        return torch.zeros(())
    if ord == 2:
        return leaf.root_of_sum(leaf.sum_squares.each([(x,) for x in leaves]))
    return leaf.largest(leaf.max_abs.each([(x,) for x in leaves]))


def clip_by_global_norm(max_norm: float) -> Transform:
    """Scales all gradients by one factor, so that their global norm is at most `max_norm` (as torch's clip_grad_norm_).

    Its state is `{"norm": float[]}`: the norm before clipping of the last update, in float32 or wider. With
    `max_norm=math.inf` it only reports.

    Raises:
        OptimizerError: a maximum that is not positive.

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
        dtype = leaf.widest([torch.empty(0, dtype=leaf.wide_dtype(p.dtype)) for p in leaves])
        return {"norm": torch.zeros((), dtype=dtype, device=device(leaves))}

    def update(grads: tree.Tree, state: tree.Tree, params: tree.Tree) -> tuple[tree.Tree, tree.Tree]:
        norm = global_norm(grads)
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        return scaled(grads, factor), {"norm": norm.to(state["norm"].dtype)}

    return Transform(init, update, text("clip_by_global_norm", {"max_norm": max_norm}))
