"""Muon: momentum whose matrices are made orthogonal."""

import math

from fx_feather import tree
from fx_feather.errors import OptimizerError, message, raise_all
from fx_feather.settings import check, is_count, text

from . import leaf
from .schedules import as_schedule, shown
from .transform import (
    LearningRate,
    Transform,
    columns,
    decay_check,
    eps_check,
    first_step,
    lr_check,
    rate_check,
    rows,
    zeros,
)

_SCALES = ("original", "match_rms_adamw")


def muon(
    lr: LearningRate,
    momentum: float = 0.95,
    nesterov: bool = True,
    weight_decay: float = 0.1,
    steps: int = 5,
    scale: str = "original",
    eps: float = 1e-7,
) -> Transform:
    """Muon: the momentum of a matrix, with its singular values brought near 1 (as `torch.optim.Muon`, in float32).

    Its state is `{"step": int64[], "velocity": ...}`. It is for the matrices of hidden layers; other leaves, and by
    custom embeddings and heads, go to another optimizer:
    `ff.multi_transform({"*['mlp']*": ff.muon(0.02), "*": ff.adamw(3e-4)})`.

    In every layout each rank that needs a part of a split matrix gathers the whole momentum of that matrix, and takes
    the same steps: the update is right however the matrix is split, at the cost of one gather of it a step.

    Args:
        lr: as for `adamw`.
        momentum: decay of the velocity, which is a mean of gradients.
        nesterov: whether the direction is taken one step ahead.
        weight_decay: the rate of decay, before the learning rate.
        steps: of the Newton-Schulz iteration.
        scale: of an update of shape `[m, n]`: `original` is sqrt(max(1, m / n)), `match_rms_adamw`
            0.2 sqrt(max(m, n)), with which rates are those of AdamW.
        eps: the least norm that a matrix is divided by.

    Raises:
        OptimizerError: settings outside their range, and with the first parameters seen, leaves that are no matrices;
            all of them at once.

    Source: Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024.

    >>> import torch
    >>> optimizer, params = muon(lr=0.1), {"w": torch.zeros(2, 2)}
    >>> updates, _ = optimizer.update({"w": torch.tensor([[3.0, 0.0], [0.0, 1e-2]])}, optimizer.init(params), params)
    >>> 0.06 < -updates["w"][0, 0] < 0.13  # near lr, however large the gradient is
    tensor(True)
    """
    settings = {
        "lr": lr,
        "momentum": momentum,
        "nesterov": nesterov,
        "weight_decay": weight_decay,
        "steps": steps,
        "scale": scale,
        "eps": eps,
    }
    checks = [
        lr_check(lr),
        rate_check("momentum", momentum),
        decay_check(weight_decay),
        ("steps", is_count(steps, 1), "the iteration takes a step or more", "steps=5"),
        ("scale", scale in _SCALES, f"the scales are {' and '.join(_SCALES)}", "scale='original'"),
        eps_check(eps),
    ]
    check(OptimizerError, "muon", settings, checks)
    schedule = as_schedule(lr, "muon")

    def times(m: int, n: int) -> float:
        return math.sqrt(max(1.0, m / n)) if scale == "original" else 0.2 * math.sqrt(max(m, n))

    def matrices(params: tree.Tree) -> None:
        wrong = [(path, x) for path, x in zip(tree.paths(params), tree.leaves(params), strict=True) if x.ndim != 2]
        raise_all(
            OptimizerError,
            [
                message(
                    call=f"muon(...) at params{path}",
                    got=f"a leaf of shape {list(x.shape)}",
                    number=f"{x.ndim} dims",
                    rule="only matrices have singular values; a stack of matrices is none",
                    fix=f"ff.multi_transform({{{path!r}: ff.adamw(3e-4), '*': {text('ff.muon', {'lr': lr})}}})",
                )
                for path, x in wrong
            ],
        )

    def init(params: tree.Tree) -> tree.Tree:
        matrices(params)
        return {"step": first_step(params), "velocity": zeros(params)}

    def update(grads: tree.Tree, state: tree.Tree, params: tree.Tree) -> tuple[tree.Tree, tree.Tree]:
        matrices(params)
        beside, treedef = rows("muon.update", params, grads=grads, velocity=state["velocity"])
        rate = schedule(state["step"])
        out = leaf.muon.each(
            [
                (grad, v, param, rate, momentum, nesterov, weight_decay, steps, times(*param.shape), eps)
                for param, grad, v in beside
            ]
        )
        updates, velocity = (tree.unflatten(treedef, column) for column in columns(out, 2))
        return updates, {"step": state["step"] + 1, "velocity": velocity}

    return Transform(init, update, text("muon", settings | {"lr": shown(lr, schedule)}))
