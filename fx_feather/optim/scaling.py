"""Parts to chain that scale updates, or add decayed weights to them."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch

from fx_feather import tree
from fx_feather.errors import OptimizerError
from fx_feather.settings import check, is_finite, text

from . import leaf
from .computed import LARGEST
from .schedules import as_schedule, shown
from .transform import DecayMask, Factor, Transform, decay_check, decays, device, first_step, rows, scaled, stateless


def scale(factor: float) -> Transform:
    """Multiplies all updates by a number, `-lr` to descend.

    Raises:
        OptimizerError: a factor that is not finite.

    >>> import torch
    >>> scale(-0.5).update({"w": torch.ones(1)}, (), {"w": torch.ones(1)})
    ({'w': tensor([-0.5000])}, ())
    """
    check(
        OptimizerError,
        "scale",
        {"factor": factor},
        [
            (
                "factor",
                is_finite(factor) and abs(factor) <= LARGEST,
                "a factor is finite, also in float32",
                "factor=-1e-3",
            )
        ],
    )

    def rescale(grads: tree.Tree, state: tree.Tree, before: Factor) -> tuple[Factor, tree.Tree]:
        # In float64: the product of two factors is taken before it meets a leaf.
        if before is None:
            before = torch.ones((), device=device(tree.leaves(grads)))
        return before.to(torch.float64) * float(factor), state

    plain = stateless(lambda grads, params: scaled(grads, float(factor)), text("scale", {"factor": factor}))
    return dataclasses.replace(plain, rescale=rescale)


def scale_by_schedule(schedule: Callable[[Any], Any]) -> Transform:
    """Multiplies all updates by a function of the step; its state is `{"step": int64[]}`.

    It is a schedule, or a function in Python, which may branch on the step.

    Raises:
        OptimizerError: a schedule that cannot be called.

    >>> from fx_feather.optim import linear
    >>> scale_by_schedule(linear(0.0, 1.0, 10))
    scale_by_schedule(schedule=linear(init=0.0, end=1.0, steps=10))
    """
    settings = {"schedule": schedule}
    check(
        OptimizerError,
        "scale_by_schedule",
        settings,
        [
            (
                "schedule",
                callable(schedule),
                "a schedule is a function of the step",
                f"ff.scale({schedule!r}), for a number",
            )
        ],
    )

    computed = as_schedule(schedule, "scale_by_schedule", least=-math.inf)

    def init(params: tree.Tree) -> tree.Tree:
        return {"step": first_step(params)}

    def update(grads: tree.Tree, state: tree.Tree, params: tree.Tree) -> tuple[tree.Tree, tree.Tree]:
        factor = computed(state["step"])
        return scaled(grads, factor), {"step": state["step"] + 1}

    return Transform(init, update, text("scale_by_schedule", {"schedule": shown(schedule, computed)}))


def add_decayed_weights(weight_decay: float, decay_mask: DecayMask = None) -> Transform:
    """Adds `weight_decay` times the parameter to each update that the mask selects (see `adamw`).

    Raises:
        OptimizerError: a negative rate.

    >>> import torch
    >>> add_decayed_weights(0.5).update({"w": torch.zeros(1, 1)}, (), {"w": torch.ones(1, 1)})
    ({'w': tensor([[0.5000]])}, ())
    """
    settings = {"weight_decay": weight_decay}
    check(OptimizerError, "add_decayed_weights", settings, [decay_check(weight_decay)])

    def apply(grads: tree.Tree, params: tree.Tree) -> tree.Tree:
        beside, treedef = rows("add_decayed_weights.update", params, grads=grads)
        rates = decays(decay_mask, params, weight_decay)
        return tree.unflatten(treedef, leaf.decayed.each([(g, p, d) for (p, g), d in zip(beside, rates, strict=True)]))

    return stateless(apply, text("add_decayed_weights", settings))
