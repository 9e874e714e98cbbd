"""A moving average of the weights, kept beside an optimizer's state."""

from typing import Any

from fx_feather import tree
from fx_feather.errors import OptimizerError, fail
from fx_feather.settings import check, text

from . import leaf
from .transform import Factor, Transform, apply_updates, rate_check, rows


def ema(optimizer: Transform, decay: float = 0.999) -> Transform:
    """An optimizer that also keeps an exponential moving average of the parameters, which `averaged` takes out.

    Its state is `{"optimizer": ..., "ema": ...}`, the average in float32 or wider; it begins at the first parameters.

    Args:
        optimizer: whose steps are averaged.
        decay: of the average at each step; the new parameters count by 1 - decay.

    Raises:
        OptimizerError: a decay outside [0, 1), or no transform.

    Source: Polyak and Juditsky, Acceleration of Stochastic Approximation by Averaging, with a decaying weight.

    >>> import torch
    >>> from fx_feather.optim import sgd
    >>> optimizer, params = ema(sgd(lr=1.0), decay=0.75), {"w": torch.zeros(1)}
    >>> params, state = optimizer.step({"w": -torch.ones(1)}, optimizer.init(params), params)
    >>> params, averaged(state, params)
    ({'w': tensor([1.])}, {'w': tensor([0.2500])})
    """
    settings = {"optimizer": optimizer, "decay": decay}
    fine = isinstance(optimizer, Transform)
    check(
        OptimizerError,
        "ema",
        settings,
        [
            ("optimizer", fine, "an optimizer is a pair (init, update)", "ff.ema(ff.adamw(3e-4))"),
            rate_check("decay", decay),
        ],
    )

    def init(params: tree.Tree) -> tree.Tree:
        leaves, treedef = tree.flatten(params)
        start = tree.unflatten(treedef, leaf.copied.each([(p,) for p in leaves]))
        return {"optimizer": optimizer.init(params), "ema": start}

    def after(state: tree.Tree, new: tree.Tree) -> tree.Tree:
        beside, treedef = rows("ema.update", new, ema=state["ema"])
        return tree.unflatten(treedef, leaf.moved_average.each([(mean, p, decay) for p, mean in beside]))

    def update(grads: tree.Tree, state: tree.Tree, params: tree.Tree) -> tuple[tree.Tree, tree.Tree]:
        updates, own = optimizer.update(grads, state["optimizer"], params)
        return updates, {"optimizer": own, "ema": after(state, apply_updates(params, updates))}

    def fused(grads: tree.Tree, state: tree.Tree, params: tree.Tree, factor: Factor) -> tuple[tree.Tree, tree.Tree]:
        new, own = optimizer.step(grads, state["optimizer"], params, factor)
        return new, {"optimizer": own, "ema": after(state, new)}

    return Transform(init, update, text("ema", settings), fused, frozen=optimizer.frozen)


def averaged(state: Any, params: tree.Tree) -> tree.Tree:
    """The parameters with their moving averages in the place of those that have one, each in its parameter's dtype.

    Args:
        state: of an optimizer with an `ema` in it: `state.opt`.
        params: those that the step returned with it; of parameters that are frozen the values are taken.

    Raises:
        OptimizerError: a state without a moving average, or with several.
    """
    found = list(_found(state))
    if len(found) != 1:
        fail(
            OptimizerError,
            call="averaged(state, params)",
            got=f"a {type(state).__name__} of the leaves {', '.join(tree.paths(state)[:4])}",
            number=f"{len(found)} moving averages",
            rule="it takes out the one average that an optimizer keeps",
            fix="averaged(state.opt, state.params), with an optimizer such as ff.ema(ff.adamw(3e-4))",
        )
    means = dict(zip(tree.paths(found[0]), tree.leaves(found[0]), strict=True))
    return tree.map_with_path(lambda path, p: means[path].to(p.dtype) if path in means else p, params)


def _found(state: Any) -> Any:
    """The averages in a state, which may be inside of others."""
    if isinstance(state, dict) and state.keys() == {"optimizer", "ema"}:
        yield state["ema"]
    elif isinstance(state, (dict, tuple, list)):
        for part in state.values() if isinstance(state, dict) else state:
            yield from _found(part)
