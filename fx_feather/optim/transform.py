"""The pair (init, update), how pairs are chained, and what all of them share: rows of leaves, masks, checks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fx_feather import tree
from fx_feather.errors import OptimizerError, ShapeError, message, raise_all
from fx_feather.settings import Check, is_finite

from . import leaf
from .computed import LARGEST

LearningRate = float | Tensor | Callable[[Any], Any]
Update = Callable[[tree.Tree, tree.Tree, tree.Tree], tuple[tree.Tree, tree.Tree]]
#: A number that all gradients are still to be multiplied by, float[]; None for 1.
Factor = Tensor | None
DecayMask = tree.Tree | Callable[[tree.Tree], tree.Tree] | None


@dataclass(frozen=True, repr=False)
class Transform:
    """A pure pair: `init(params) -> state`, `update(grads, state, params) -> (updates, state)`.

    Updates are added to the parameters (`apply_updates`), so a transform that descends returns negative multiples of
    gradients. States are pytrees of tensors. Where one holds a tree of statistics, it has the structure of the
    parameters under a key of its own (`state["mu"]["layers"][3]...`), so that it can be split as they are.

    Attributes:
        init, update: the pair.
        text: how it prints.
        fused: `(grads, state, params, factor) -> (params, state)`, which gives what `update` of `factor` times the
            gradients and then `apply_updates` give, but for rounding, in fewer passes over memory.
        frozen: numbers of the leaves of a tree like the parameters that the whole optimizer leaves as they are: their
            gradients are neither read nor counted, and may have another shape.
        rescale: `(grads, state, factor) -> (factor, state)`, for what multiplies all gradients by one number: the new
            factor, so that no pass over memory is needed for it.

    >>> from fx_feather.optim import sgd
    >>> sgd(lr=0.5)
    sgd(lr=0.5, momentum=0.0, nesterov=False, weight_decay=0.0)
    """

    init: Callable[[tree.Tree], tree.Tree]
    update: Update
    text: str = "Transform(...)"
    fused: Callable[[tree.Tree, tree.Tree, tree.Tree, Factor], tuple[tree.Tree, tree.Tree]] | None = None
    rescale: Callable[[tree.Tree, tree.Tree, Factor], tuple[Factor, tree.Tree]] | None = None
    frozen: Callable[[tree.Tree], frozenset[int]] | None = None

    def step(
        self, grads: tree.Tree, state: tree.Tree, params: tree.Tree, factor: Factor = None
    ) -> tuple[tree.Tree, tree.Tree]:
        """The updated parameters, and the new state, for `factor` times the gradients; what a compiled step runs.

        >>> from fx_feather.optim import sgd
        >>> optimizer, params = sgd(lr=0.5), {"w": torch.ones(2)}
        >>> optimizer.step({"w": torch.tensor([1.0, 2.0])}, optimizer.init(params), params)[0]
        {'w': tensor([0.5000, 0.0000])}
        """
        if self.fused is not None:
            return self.fused(grads, state, params, factor)
        updates, state = self.update(multiplied(grads, factor), state, params)
        return apply_updates(params, updates), state

    def __repr__(self) -> str:
        return self.text


def chain(*transforms: Transform) -> Transform:
    """Applies transforms one after another; its state is the tuple of theirs.

    Raises:
        OptimizerError: an argument that is no Transform.

    >>> from fx_feather.optim import adamw, clip_by_global_norm
    >>> chain(clip_by_global_norm(1.0), adamw(lr=3e-4))
    chain(clip_by_global_norm(max_norm=1.0), adamw(lr=0.0003, b1=0.9, b2=0.95, eps=1e-08, weight_decay=0.1))
    """
    text = f"chain({', '.join(map(repr, transforms))})"
    raise_all(
        OptimizerError,
        [
            message(
                call=text,
                got=f"argument {i} of type {type(t).__name__}",
                number=f"argument {i} is {t!r}",
                rule="a chain is made of transforms, each a pair of init and update",
                fix="chain(ff.clip_by_global_norm(1.0), ff.adamw(lr=3e-4)): call each of them",
            )
            for i, t in enumerate(transforms)
            if not isinstance(t, Transform)
        ],
    )

    def init(params: tree.Tree) -> tree.Tree:
        return tuple(t.init(params) for t in transforms)

    def update(grads: tree.Tree, state: tree.Tree, params: tree.Tree) -> tuple[tree.Tree, tree.Tree]:
        states = []
        for t, own in zip(transforms, state, strict=True):
            grads, new = t.update(grads, own, params)
            states.append(new)
        return grads, tuple(states)

    def fused(grads: tree.Tree, state: tree.Tree, params: tree.Tree, factor: Factor) -> tuple[tree.Tree, tree.Tree]:
        states = []
        for t, own in zip(transforms[:-1], state[:-1], strict=True):
            if t.rescale is not None:
                factor, new = t.rescale(grads, own, factor)
            else:
                grads, new = t.update(multiplied(grads, factor), own, params)
                factor = None
            states.append(new)
        # Only what comes last adds its updates to the parameters.
        params, new = transforms[-1].step(grads, state[-1], params, factor)
        return params, (*states, new)

    return Transform(init, update, text, fused if transforms else None)


def apply_updates(params: tree.Tree, updates: tree.Tree) -> tree.Tree:
    """The parameters plus the updates, each in its parameter's dtype.

    Raises:
        ShapeError: trees of different structure, or leaves of different shape.

    >>> apply_updates({"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([0.5, -0.5])})
    {'w': tensor([1.5000, 1.5000])}
    """
    beside, treedef = rows("apply_updates(params, updates)", params, updates=updates)
    return tree.unflatten(treedef, leaf.applied.each(beside))


def stateless(apply: Callable[[tree.Tree, tree.Tree], tree.Tree], text: str) -> Transform:
    """A transform of the updates and parameters alone; its state is the empty tuple."""
    return Transform(lambda params: (), lambda grads, state, params: (apply(grads, params), ()), text)


def rows(call: str, params: tree.Tree, **others: tree.Tree) -> tuple[list[tuple[Tensor, ...]], tree.TreeDef]:
    """The leaves of the parameters beside those of the other trees, and the parameters' definition."""
    leaves, treedef = tree.flatten(params)
    columns: list[list[Tensor]] = [leaves]
    problems: list[str] = []
    for name, other in others.items():
        tree.check_same(treedef, other, call=call, name=name)
        columns.append(tree.leaves(other))
        # A wrong shape would broadcast in silence.
        wrong = [i for i, (p, own) in enumerate(zip(leaves, columns[-1], strict=True)) if own.shape != p.shape]
        paths = tree.paths_of(treedef) if wrong else []
        problems += [
            message(
                call=f"{call} at params{paths[i]}",
                got=f"{name}{paths[i]} of shape {list(columns[-1][i].shape)}",
                number=f"shape {list(columns[-1][i].shape)}, where the parameter has {list(leaves[i].shape)}",
                rule="gradients, updates and statistics have the shape of their parameter",
                fix=f"pass {name} made for these parameters",
            )
            for i in wrong
        ]
    raise_all(ShapeError, problems)
    return list(zip(*columns, strict=True)), treedef


def columns(rows: list[tuple[Tensor, ...]], width: int) -> list[list[Tensor]]:
    """The columns of a table of `width` columns, which may have no row."""
    return [[row[i] for row in rows] for i in range(width)]


def decays(mask: DecayMask, params: tree.Tree, weight_decay: float) -> list[float]:
    """The decay of each leaf: a Python number, since it is known before a step runs."""
    if mask is None:
        return [weight_decay if p.ndim >= 2 else 0.0 for p in tree.leaves(params)]
    chosen = mask(params) if callable(mask) else mask
    tree.check_same(params, chosen, call="optimizer.update with decay_mask", name="decay_mask")
    return [weight_decay if m else 0.0 for m in tree.leaves(chosen)]


def zeros(params: tree.Tree) -> tree.Tree:
    """Statistics at the start: like the parameters, in float32 or wider."""
    leaves, treedef = tree.flatten(params)
    return tree.unflatten(treedef, leaf.zeros.each([(p,) for p in leaves]))


def scaled(updates: tree.Tree, factor: Tensor | float) -> tree.Tree:
    """All updates times one factor."""
    leaves, treedef = tree.flatten(updates)
    return tree.unflatten(treedef, leaf.scaled.each([(x, factor) for x in leaves]))


def multiplied(grads: tree.Tree, factor: Factor) -> tree.Tree:
    """The gradients that a factor stands for."""
    return grads if factor is None else scaled(grads, factor)


def first_step(params: tree.Tree) -> Tensor:
    """The count of updates at the start."""
    return torch.zeros((), dtype=torch.int64, device=device(tree.leaves(params)))


def device(leaves: list[Tensor]) -> torch.device | None:
    """Where the leaves are; None, for torch's default, if there are none."""
    return leaves[0].device if leaves else None


def lr_check(lr: Any) -> Check:
    """The learning rate's rule."""
    fix = "lr=3e-4, or a schedule such as ff.warmup_cosine(peak=3e-4, warmup_steps=100, total_steps=2000)"
    number = lr.item() if isinstance(lr, Tensor) and not lr.ndim else lr
    fine = callable(lr) or (is_finite(number, least=0) and number <= LARGEST)
    return "lr", fine, "a learning rate is finite and not negative", fix


def rate_check(name: str, x: Any) -> Check:
    """The rule of a rate of decay of a statistic."""
    return name, is_finite(x, least=0) and x < 1, f"{name} is at least 0 and below 1", f"{name}=0.9"


def eps_check(eps: Any) -> Check:
    """The rule of Adam's eps."""
    fine = is_finite(eps, above=0) and torch.finfo(torch.float32).tiny <= eps <= LARGEST
    return "eps", fine, "eps is positive, also in float32, so that no division is by zero", "eps=1e-8"


def decay_check(x: Any) -> Check:
    """The rule of a weight decay."""
    return "weight_decay", is_finite(x, least=0), "a rate of decay is finite and not negative", "weight_decay=0.1"
