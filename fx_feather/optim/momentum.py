"""Stochastic gradient descent, and momentum as a part to chain."""

from typing import Any

from fx_feather import tree
from fx_feather.errors import OptimizerError
from fx_feather.settings import Check, check, text

from . import leaf
from .schedules import as_schedule, shown
from .transform import (
    DecayMask,
    LearningRate,
    Transform,
    columns,
    decay_check,
    decays,
    first_step,
    lr_check,
    rate_check,
    rows,
    zeros,
)


def sgd(
    lr: LearningRate,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    decay_mask: DecayMask = None,
) -> Transform:
    """Stochastic gradient descent with momentum (as `torch.optim.SGD` without dampening).

    Its state is `{"step": int64[], "velocity": ...}`, the velocity in float32 or wider, and absent without momentum.

    Args:
        lr: a number, or a function from the step (the number of updates done, 0 at the first) to the rate: a schedule,
            or one in Python, which may branch on the step.
        momentum: decay of the velocity; 0 for none.
        nesterov: whether the direction is taken one step ahead.
        weight_decay: times the parameter, added to the gradient.
        decay_mask: which parameters decay, as for `adamw`: by default those of two dims or more.

    Raises:
        OptimizerError: settings outside their range; all of them at once.

    >>> import torch
    >>> optimizer, params = sgd(lr=0.5), {"w": torch.ones(2)}
    >>> optimizer.update({"w": torch.tensor([1.0, 2.0])}, optimizer.init(params), params)[0]
    {'w': tensor([-0.5000, -1.0000])}
    """
    settings = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
    check(
        OptimizerError,
        "sgd",
        settings,
        [lr_check(lr), rate_check("momentum", momentum), _lookahead(momentum, nesterov), decay_check(weight_decay)],
    )
    schedule = as_schedule(lr, "sgd")

    def init(params: tree.Tree) -> tree.Tree:
        return {"step": first_step(params)} | ({"velocity": zeros(params)} if momentum else {})

    def update(grads: tree.Tree, state: tree.Tree, params: tree.Tree) -> tuple[tree.Tree, tree.Tree]:
        rate, step = schedule(state["step"]), state["step"] + 1
        rates = decays(decay_mask, params, weight_decay)
        if not momentum:
            beside, treedef = rows("sgd.update", params, grads=grads)
            plain = leaf.plain_sgd.each(
                [(grad, param, rate, d) for (param, grad), d in zip(beside, rates, strict=True)]
            )
            return tree.unflatten(treedef, plain), {"step": step}
        beside, treedef = rows("sgd.update", params, grads=grads, velocity=state["velocity"])
        out = leaf.sgd.each(
            [
                (grad, velocity, param, rate, momentum, nesterov, decay)
                for (param, grad, velocity), decay in zip(beside, rates, strict=True)
            ]
        )
        updates, velocity = (tree.unflatten(treedef, column) for column in columns(out, 2))
        return updates, {"step": step, "velocity": velocity}

    return Transform(init, update, text("sgd", settings | {"lr": shown(lr, schedule)}))


def trace(momentum: float, nesterov: bool = False) -> Transform:
    """Momentum: a decaying sum of gradients; its state is `{"velocity": ...}`.

    Raises:
        OptimizerError: a momentum outside [0, 1).

    >>> trace(0.9, nesterov=True)
    trace(momentum=0.9, nesterov=True)
    """
    settings = {"momentum": momentum, "nesterov": nesterov}
    check(OptimizerError, "trace", settings, [rate_check("momentum", momentum)])

    def init(params: tree.Tree) -> tree.Tree:
        return {"velocity": zeros(params)}

    def update(grads: tree.Tree, state: tree.Tree, params: tree.Tree) -> tuple[tree.Tree, tree.Tree]:
        beside, treedef = rows("trace.update", params, grads=grads, velocity=state["velocity"])
        out = leaf.with_momentum.each([(grad, velocity, momentum, nesterov) for _, grad, velocity in beside])
        updates, velocity = (tree.unflatten(treedef, column) for column in columns(out, 2))
        return updates, {"velocity": velocity}

    return Transform(init, update, text("trace", settings))


def _lookahead(momentum: Any, nesterov: bool) -> Check:
    fine = not nesterov or momentum != 0
    return "nesterov", fine, "Nesterov's momentum needs momentum > 0", "momentum=0.9, or nesterov=False"
