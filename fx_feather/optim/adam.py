"""AdamW, and Adam's direction as a part to chain."""

import functools as ft

import torch
from torch import Tensor

from fx_feather import tree
from fx_feather.errors import OptimizerError
from fx_feather.settings import check, text
from fx_feather.trace import block

from . import leaf
from .schedules import as_schedule, shown
from .transform import (
    DecayMask,
    Factor,
    LearningRate,
    Transform,
    columns,
    decay_check,
    decays,
    eps_check,
    first_step,
    lr_check,
    rate_check,
    rows,
    zeros,
)


def adamw(
    lr: LearningRate,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    decay_mask: DecayMask = None,
) -> Transform:
    """AdamW: Adam with decoupled weight decay, scaled by the learning rate (as `torch.optim.AdamW`).

    Its state is `{"step": int64[], "mu": ..., "nu": ...}`, the moments in float32 or wider.

    Args:
        lr: a number, or a function from the step (the number of updates done, 0 at the first) to the rate: a schedule,
            or one in Python, which may branch on the step.
        b1: decay of the first moment.
        b2: decay of the second moment.
        eps: added to the root of the second moment.
        weight_decay: the rate of decay, before the learning rate.
        decay_mask: which parameters decay: a pytree of bools like the parameters, or a function from the parameters
            to one. By default those of two dims or more, so that no bias or norm weight does.

    Raises:
        OptimizerError: settings outside their range; all of them at once.

    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, algorithm 2.

    >>> import torch
    >>> optimizer, params = adamw(lr=0.1), {"w": torch.ones(2)}
    >>> updates, state = optimizer.update({"w": torch.tensor([5.0, -5.0])}, optimizer.init(params), params)
    >>> updates["w"], state["step"]
    (tensor([-0.1000,  0.1000]), tensor(1))
    """
    settings = {"lr": lr, "b1": b1, "b2": b2, "eps": eps, "weight_decay": weight_decay}
    check(
        OptimizerError,
        "adamw",
        settings,
        [lr_check(lr), rate_check("b1", b1), rate_check("b2", b2), eps_check(eps), decay_check(weight_decay)],
    )
    schedule = as_schedule(lr, "adamw")
    one_leaf = block(ft.partial(leaf.adamw_step_leaf, b1=b1, b2=b2, eps=eps), name="adamw")

    def init(params: tree.Tree) -> tree.Tree:
        return {"step": first_step(params), "mu": zeros(params), "nu": zeros(params)}

    def update(grads: tree.Tree, state: tree.Tree, params: tree.Tree) -> tuple[tree.Tree, tree.Tree]:
        beside, treedef = rows("adamw.update", params, grads=grads, mu=state["mu"], nu=state["nu"])
        rate, (correct1, correct2) = schedule(state["step"]), _corrections(state["step"], b1, b2)
        rates = decays(decay_mask, params, weight_decay)
        out = leaf.adamw.each(
            [
                (grad, mu, nu, param, rate, correct1, correct2, b1, b2, eps, decay)
                for (param, grad, mu, nu), decay in zip(beside, rates, strict=True)
            ]
        )
        updates, mu, nu = (tree.unflatten(treedef, column) for column in columns(out, 3))
        return updates, {"step": state["step"] + 1, "mu": mu, "nu": nu}

    def fused(grads: tree.Tree, state: tree.Tree, params: tree.Tree, factor: Factor) -> tuple[tree.Tree, tree.Tree]:
        beside, treedef = rows("adamw.step", params, grads=grads, mu=state["mu"], nu=state["nu"])
        rate, step = schedule(state["step"]), state["step"] + 1
        rates, number = decays(decay_mask, params, weight_decay), step.to(torch.float32)
        # Rounded once, outside of the block: the update of a leaf is then one kernel, and leaves alike run at once.
        factor = torch.ones_like(number) if factor is None else factor
        factors = {dtype: factor.to(dtype) for dtype in dict.fromkeys(mu.dtype for _, _, mu, _ in beside)}
        out = one_leaf.each(
            [
                (grad, factors[mu.dtype], mu, nu, param, rate, number, decay)
                for (param, grad, mu, nu), decay in zip(beside, rates, strict=True)
            ]
        )
        new, mu, nu = (tree.unflatten(treedef, column) for column in columns(out, 3))
        return new, {"step": step, "mu": mu, "nu": nu}

    return Transform(init, update, text("adamw", settings | {"lr": shown(lr, schedule)}), fused)


def scale_by_adam(b1: float = 0.9, b2: float = 0.95, eps: float = 1e-8) -> Transform:
    """Turns gradients into Adam's direction, without a learning rate; its state is that of `adamw`.

    Raises:
        OptimizerError: settings outside their range; all of them at once.

    Source: Kingma and Ba, Adam, algorithm 1.

    >>> import torch
    >>> adam = scale_by_adam()
    >>> adam.update({"w": torch.tensor([5.0])}, adam.init({"w": torch.zeros(1)}), {"w": torch.zeros(1)})[0]
    {'w': tensor([1.])}
    """
    settings = {"b1": b1, "b2": b2, "eps": eps}
    check(OptimizerError, "scale_by_adam", settings, [rate_check("b1", b1), rate_check("b2", b2), eps_check(eps)])

    def init(params: tree.Tree) -> tree.Tree:
        return {"step": first_step(params), "mu": zeros(params), "nu": zeros(params)}

    def update(grads: tree.Tree, state: tree.Tree, params: tree.Tree) -> tuple[tree.Tree, tree.Tree]:
        beside, treedef = rows("scale_by_adam.update", params, grads=grads, mu=state["mu"], nu=state["nu"])
        corrections = _corrections(state["step"], b1, b2)
        out = leaf.adam.each([(grad, mu, nu, *corrections, b1, b2, eps) for _, grad, mu, nu in beside])
        updates, mu, nu = (tree.unflatten(treedef, column) for column in columns(out, 3))
        return updates, {"step": state["step"] + 1, "mu": mu, "nu": nu}

    return Transform(init, update, text("scale_by_adam", settings))


def _corrections(step: Tensor, b1: float, b2: float) -> tuple[Tensor, Tensor]:
    """What the moments after this update must be divided by, since they started at zero."""
    return leaf.corrections(step + 1, b1, b2)
