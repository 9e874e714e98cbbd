"""Transforms of some parameters only: frozen ones, masks, and groups, chosen by patterns of their paths."""

import difflib
import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

from fx_feather import tree
from fx_feather.errors import OptimizerError, message, raise_all

from .transform import Factor, Transform, zeros


def freeze(optimizer: Transform, *patterns: str) -> Transform:
    """An optimizer that leaves parameters as they are whose path matches a pattern; the others it sees alone.

    Frozen parameters have no state, and nothing that `optimizer` sums over all parameters, such as a norm, counts them.
    A compiled step computes and reduces no gradients of theirs. That holds for the optimizer as a whole: freeze a
    chain, and not a part of it.

    Args:
        optimizer: for the others. A `decay_mask` of its own is a function, since it gets a tree without the frozen.
        patterns: of paths such as `['layers'][3]['mlp']['up']`, as `fnmatch` reads `*` and `?`.

    Raises:
        OptimizerError: with the first parameters seen, patterns that hit nothing, all at once; or that hit everything.

    >>> import torch
    >>> from fx_feather.optim import sgd
    >>> tuned, params = freeze(sgd(lr=0.5), "*['base']*"), {"base": torch.ones(2), "head": torch.ones(2)}
    >>> tuned.step({"base": torch.ones(2), "head": torch.ones(2)}, tuned.init(params), params)[0]
    {'base': tensor([1., 1.]), 'head': tensor([0.5000, 0.5000])}
    """
    name = f"freeze({optimizer!r}, {', '.join(map(repr, patterns))})"
    _check(name, {"optimizer": optimizer}, patterns)

    def frozen(params: tree.Tree) -> frozenset[int]:
        at = _chosen(name, params, patterns)
        out = frozenset(i for i, k in enumerate(at) if k is not None)
        if out and len(out) == len(at):
            problem = f"all {len(at)} parameters match"
            raise OptimizerError(
                message(
                    call=name,
                    got=f"{len(at)} parameters",
                    number=problem,
                    rule="an optimizer has something to move",
                    fix="a pattern that leaves some of them out",
                )
            )
        return out

    def kept(params: tree.Tree) -> list[bool]:
        out = frozen(params)
        return [i not in out for i in range(len(tree.leaves(params)))]

    def init(params: tree.Tree) -> tree.Tree:
        return optimizer.init(_select(params, kept(params)))

    def update(grads: tree.Tree, state: tree.Tree, params: tree.Tree) -> tuple[tree.Tree, tree.Tree]:
        keep = kept(params)
        updates, state = optimizer.update(_select(grads, keep), state, _select(params, keep))
        return _joined(params, [(keep, updates)], zeros(params)), state

    def fused(grads: tree.Tree, state: tree.Tree, params: tree.Tree, factor: Factor) -> tuple[tree.Tree, tree.Tree]:
        keep = kept(params)
        new, state = optimizer.step(_select(grads, keep), state, _select(params, keep), factor)
        return _joined(params, [(keep, new)], params), state

    return Transform(init, update, name, fused, frozen=frozen)


def masked(transform: Transform, *patterns: str) -> Transform:
    """A part of a chain that acts on the parameters alone whose path matches a pattern; other updates pass it by.

    Args:
        transform: it sees these parameters, and has state for them, alone.
        patterns: of paths, as for `freeze`.

    Raises:
        OptimizerError: with the first parameters seen, patterns that hit nothing, all at once.

    >>> import torch
    >>> from fx_feather.optim import scale
    >>> slower, params = masked(scale(0.1), "*['embed']"), {"embed": torch.ones(1), "head": torch.ones(1)}
    >>> slower.update(params, slower.init(params), params)[0]
    {'embed': tensor([0.1000]), 'head': tensor([1.])}
    """
    name = f"masked({transform!r}, {', '.join(map(repr, patterns))})"
    _check(name, {"transform": transform}, patterns)

    def kept(params: tree.Tree) -> list[bool]:
        return [k is not None for k in _chosen(name, params, patterns)]

    def init(params: tree.Tree) -> tree.Tree:
        return transform.init(_select(params, kept(params)))

    def update(grads: tree.Tree, state: tree.Tree, params: tree.Tree) -> tuple[tree.Tree, tree.Tree]:
        keep = kept(params)
        updates, state = transform.update(_select(grads, keep), state, _select(params, keep))
        return _joined(params, [(keep, updates)], grads), state

    return Transform(init, update, name)


def multi_transform(transforms: Mapping[str, Transform]) -> Transform:
    """One transform for each group of parameters: the first whose pattern matches a parameter's path moves it.

    Its state is a dict of theirs, by pattern. What a transform sums over all parameters, such as a norm, it sums over
    its group: to clip by the norm of all, chain the clip before.

    Args:
        transforms: from patterns of paths, as for `freeze`, to transforms; `"*"` comes last, for the rest.

    Raises:
        OptimizerError: with the first parameters seen, patterns that hit nothing, and parameters that none matches.

    >>> import torch
    >>> from fx_feather.optim import sgd
    >>> groups = multi_transform({"*['head']": sgd(lr=1.0), "*": sgd(lr=0.1)})
    >>> params = {"base": torch.ones(1), "head": torch.ones(1)}
    >>> groups.step(params, groups.init(params), params)[0]
    {'base': tensor([0.9000]), 'head': tensor([0.])}
    """
    name = f"multi_transform({{{', '.join(f'{p!r}: {t!r}' for p, t in transforms.items())}}})"
    _check(name, dict(transforms), list(transforms))

    def groups(params: tree.Tree) -> list[tuple[str, Transform, list[bool]]]:
        chosen = _chosen(name, params, list(transforms), all_of_them=True)
        return [(p, t, [k == i for k in chosen]) for i, (p, t) in enumerate(transforms.items())]

    def init(params: tree.Tree) -> tree.Tree:
        return {pattern: t.init(_select(params, keep)) for pattern, t, keep in groups(params)}

    def update(grads: tree.Tree, state: tree.Tree, params: tree.Tree) -> tuple[tree.Tree, tree.Tree]:
        out = {
            pattern: (keep, *t.update(_select(grads, keep), state[pattern], _select(params, keep)))
            for pattern, t, keep in groups(params)
        }
        updates = _joined(params, [(keep, new) for keep, new, _ in out.values()], grads)
        return updates, {pattern: new for pattern, (_, _, new) in out.items()}

    def fused(grads: tree.Tree, state: tree.Tree, params: tree.Tree, factor: Factor) -> tuple[tree.Tree, tree.Tree]:
        out = {
            pattern: (keep, *t.step(_select(grads, keep), state[pattern], _select(params, keep), factor))
            for pattern, t, keep in groups(params)
        }
        new = _joined(params, [(keep, new) for keep, new, _ in out.values()], params)
        return new, {pattern: own for pattern, (_, _, own) in out.items()}

    return Transform(init, update, name, fused)


def _select(values: tree.Tree, keep: Sequence[bool]) -> tree.Tree:
    """The tree with None, which has no leaves, in the place of the others: paths stay what they were."""
    leaves, treedef = tree.flatten(values)
    return tree.unflatten(treedef, [x if k else None for x, k in zip(leaves, keep, strict=True)])


def _joined(params: tree.Tree, parts: Sequence[tuple[Sequence[bool], tree.Tree]], rest: tree.Tree) -> tree.Tree:
    """A tree like the parameters, of the leaves of parts of it; what belongs to no part is taken from `rest`."""
    leaves, treedef = tree.leaves(rest), tree.structure(params)
    for keep, part in parts:
        own = iter(tree.leaves(part))
        leaves = [next(own) if k else x for k, x in zip(keep, leaves, strict=True)]
    return tree.unflatten(treedef, leaves)


def _chosen(name: str, params: tree.Tree, patterns: Sequence[str], all_of_them: bool = False) -> list[int | None]:
    """For each parameter the number of the first pattern that its path matches."""
    paths = tree.paths(params)
    # fnmatch reads [...] as a set of characters; a path has brackets of its own.
    matching = [[fnmatch.fnmatchcase(path, p.replace("[", "[[]")) for path in paths] for p in patterns]
    first = [next((k for k, hits in enumerate(matching) if hits[i]), None) for i in range(len(paths))]
    problems = []
    for k, pattern in enumerate(patterns):
        if k in first:
            continue
        taken = any(matching[k])
        problems.append(
            message(
                call=f"{name}, pattern {pattern!r}",
                got=f"{len(paths)} parameters, such as {paths[0]}" if paths else "no parameters",
                number="all that it matches an earlier pattern took" if taken else "no path matches it",
                rule="a pattern acts on something; the first that matches a path takes it",
                fix="put it before the others" if taken else _nearest(pattern, paths),
            )
        )
    left = [path for path, k in zip(paths, first, strict=True) if k is None]
    if all_of_them and left:
        problems.append(
            message(
                call=name,
                got=f"params{left[0]}" + (f" and {len(left) - 1} more" if len(left) > 1 else ""),
                number=f"{len(left)} of {len(paths)} parameters match no pattern",
                rule="each parameter belongs to a group",
                fix='add a last pattern "*" with their transform, or freeze them: '
                f"ff.freeze(ff.multi_transform(...), {left[0]!r})",
            )
        )
    raise_all(OptimizerError, problems)
    return first


def _nearest(pattern: str, paths: Sequence[str]) -> str:
    plain = pattern.replace("*", "")

    def likeness(path: str) -> float:
        return difflib.SequenceMatcher(None, plain, path).ratio()

    near = sorted(paths, key=likeness, reverse=True)[:3]
    if not near:
        return "leave it out"
    return f"such as {near[0]!r}; the nearest paths are {', '.join(near)}"


def _check(name: str, transforms: Mapping[str, Any], patterns: Sequence[Any]) -> None:
    wrong = [(f"a {type(p).__name__} as a pattern", repr(p)) for p in patterns if not isinstance(p, str)]
    wrong += [
        (f"a {type(t).__name__} in the place of a transform", repr(t))
        for t in transforms.values()
        if not isinstance(t, Transform)
    ]
    if not patterns:
        wrong.append(("no pattern", "0 patterns"))
    raise_all(
        OptimizerError,
        [
            message(
                call=name,
                got=got,
                number=number,
                rule="parameters are chosen by patterns of their paths, and moved by transforms",
                fix="""ff.freeze(ff.adamw(3e-4), "*['embed']*"), or """
                """ff.multi_transform({"*['head']*": ff.adamw(3e-4), "*": ff.sgd(0.1)})""",
            )
            for got, number in wrong
        ],
    )
