"""Lion: the sign of a momentum, with decoupled weight decay."""

from fx_feather import tree
from fx_feather.errors import OptimizerError
from fx_feather.settings import check, text

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


def lion(
    lr: LearningRate,
    b1: float = 0.9,
    b2: float = 0.99,
    weight_decay: float = 0.1,
    decay_mask: DecayMask = None,
) -> Transform:
    """Lion: every element moves by the learning rate, in the direction of the sign of a momentum.

    Its state is `{"step": int64[], "mu": ...}`, half of Adam's, the momentum in float32 or wider. Its rates are three
    to ten times smaller than AdamW's, and its decay larger by as much.

    Args:
        lr: as for `adamw`.
        b1: share of the momentum in the direction.
        b2: decay of the momentum.
        weight_decay, decay_mask: as for `adamw`.

    Raises:
        OptimizerError: settings outside their range; all of them at once.

    Source: Chen et al., Symbolic Discovery of Optimization Algorithms, 2023, algorithm 2.

    >>> import torch
    >>> optimizer, params = lion(lr=0.1), {"w": torch.ones(2)}
    >>> optimizer.update({"w": torch.tensor([5.0, -0.01])}, optimizer.init(params), params)[0]
    {'w': tensor([-0.1000,  0.1000])}
    """
    settings = {"lr": lr, "b1": b1, "b2": b2, "weight_decay": weight_decay}
    checks = [lr_check(lr), rate_check("b1", b1), rate_check("b2", b2), decay_check(weight_decay)]
    check(OptimizerError, "lion", settings, checks)
    schedule = as_schedule(lr, "lion")

    def init(params: tree.Tree) -> tree.Tree:
        return {"step": first_step(params), "mu": zeros(params)}

    def update(grads: tree.Tree, state: tree.Tree, params: tree.Tree) -> tuple[tree.Tree, tree.Tree]:
        beside, treedef = rows("lion.update", params, grads=grads, mu=state["mu"])
        rate, rates = schedule(state["step"]), decays(decay_mask, params, weight_decay)
        out = leaf.lion.each(
            [(grad, mu, param, rate, b1, b2, decay) for (param, grad, mu), decay in zip(beside, rates, strict=True)]
        )
        updates, mu = (tree.unflatten(treedef, column) for column in columns(out, 2))
        return updates, {"step": state["step"] + 1, "mu": mu}

    return Transform(init, update, text("lion", settings | {"lr": shown(lr, schedule)}))
