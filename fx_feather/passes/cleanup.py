"""Cleanup: removes what computes nothing (dead nodes, aliases, views and casts to what a value already is).

Later operators were traced on the memory layout of a value: whether a view of it exists, and how the results lie. So an
edit is made only where the new operator, run on the same fake operands, gives the same shape, dtype and strides.
"""

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

_ALIASES = {aten.alias.default, aten.detach.default, aten.lift_fresh.default}
_RESHAPES = {aten.view.default, aten._unsafe_view.default, aten.expand.default, aten.reshape.default}
#: Operators of one tensor and a number, which give the same bits before a value is repeated as after.
_SCALED = {aten.mul.Scalar, aten.div.Scalar}
_CASTS = {aten._to_copy.default}


def cleanup(graph: fx.Graph) -> None:
    """Edits a local graph in place; keeps results bit for bit. No operator of it may write to an operand."""
    for n in list(graph.nodes):
        if n.op != "call_function" or not n.args or not isinstance(n.args[0], fx.Node):
            continue
        if _is_identity(n):
            n.replace_all_uses_with(n.args[0])
            graph.erase_node(n)
        elif n.target in _SCALED and n.args[0].target is aten.expand.default and len(n.args[0].users) == 1:
            _scale_before_expand(graph, n)
        elif _order(n) is not None:
            _compose(graph, n)
        elif n.target in _ONES:
            _one_view(n)
        elif n.target is aten.view.default:
            _view_of_first(n)
    graph.eliminate_dead_code()


#: Operators that take in or leave out dims of size 1.
_ONES = {aten.unsqueeze.default, aten.squeeze.dim}


def _order(n: fx.Node) -> list[int] | None:
    """The order in which an operator that only swaps dims takes those of its operand."""
    if n.target not in (aten.permute.default, aten.transpose.int, aten.t.default):
        return None
    rank = n.args[0].meta["val"].ndim
    order = list(range(rank))
    if n.target is aten.permute.default:
        return [d % rank for d in n.args[1]]
    if rank < 2:
        return order
    a, b = (0, 1) if n.target is aten.t.default else (n.args[1] % rank, n.args[2] % rank)
    order[a], order[b] = b, a
    return order


def _compose(graph: fx.Graph, n: fx.Node) -> None:
    """Two swaps after each other are one, or none."""
    first, order = n.args[0], _order(n)
    assert order is not None
    inner = _order(first) if first.op == "call_function" else None
    base = first
    if inner is not None:
        base, order = first.args[0], [inner[d] for d in order]
    if order == list(range(len(order))):
        n.replace_all_uses_with(base)
        graph.erase_node(n)
    elif inner is not None:
        _become(n, aten.permute.default, (base, order))


def _become(n: fx.Node, target: Any, args: tuple[Any, ...]) -> bool:
    """Makes a node another call, if that gives a value of the same shape and dtype that lies in memory alike."""
    new = _value(target, args)
    if new is None or not _alike(n.meta["val"], new):
        return False
    n.target, n.args, n.kwargs = target, args, {}
    return True


def _value(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
    """What an operator gives of fake operands; None if it refuses them."""
    operands = fx.node.map_arg((args, kwargs or {}), lambda x: x.meta["val"])
    try:
        return target(*operands[0], **operands[1])
    except (RuntimeError, ValueError):
        return None


def _alike(a: Any, b: Any) -> bool:
    """Whether two results have the same shape and dtype and lie in memory alike; a dim of size 1 has no stride."""
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_alike, a, b))
    if not isinstance(a, torch.Tensor):
        return bool(a == b)
    strides = zip(a.shape, a.stride(), b.stride(), strict=False)
    return a.shape == b.shape and a.dtype == b.dtype and all(n == 1 or s == t for n, s, t in strides)


def _one_view(n: fx.Node) -> None:
    """A view with a dim of size 1 more or less is a view."""
    first = n.args[0]
    shape = n.meta["val"].shape
    same = first.target is not aten.view.default or first.meta["val"].shape == shape
    if not same and _become(n, aten.view.default, (first.args[0], list(shape))):
        _view_of_first(n)


def _view_of_first(n: fx.Node) -> None:
    """A view of a view is a view of the first; dims of size 1 in between have no say in it."""
    first = n.args[0]
    while first.target in _ONES or (first.target is aten.view.default and first.args[0].meta["val"].is_contiguous()):
        first = first.args[0]
    if first is not n.args[0]:
        _become(n, n.target, (first, *n.args[1:]))


def _is_identity(n: fx.Node) -> bool:
    if n.target in _RESHAPES:
        return _same_place(n)
    if n.target in _CASTS:
        return _same_kind(n)
    return n.target in _ALIASES or (n.target is aten.pow.Tensor_Scalar and n.args[1] == 1 and _same_kind(n))


def _same_place(n: fx.Node) -> bool:
    a, b = n.args[0].meta["val"], n.meta["val"]
    return a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype


def _same_kind(n: fx.Node) -> bool:
    a, b = n.args[0].meta["val"], n.meta["val"]
    return a.dtype == b.dtype and a.device == b.device and a.stride() == b.stride()


def _scale_before_expand(graph: fx.Graph, n: fx.Node) -> None:
    """Turns a scaled `expand` into the `expand` of what is scaled, which is smaller, where users don't see it."""
    expand = n.args[0]
    small = expand.args[0]
    lies = small.meta["val"].expand(expand.args[1])
    if not all(_takes(user, n, lies) for user in n.users):
        return
    with graph.inserting_before(n):
        scaled = graph.call_function(n.target, (small, *n.args[1:]))
        scaled.meta["val"] = small.meta["val"].new_empty(small.meta["val"].shape)
        wide = graph.call_function(aten.expand.default, (scaled, *expand.args[1:]))
        wide.meta["val"] = scaled.meta["val"].expand(expand.args[1])
    n.replace_all_uses_with(wide)
    graph.erase_node(n)


def _takes(user: fx.Node, operand: fx.Node, value: torch.Tensor) -> bool:
    """Whether an operator gives the same of an operand that lies in memory as `value` does."""
    if user.op != "call_function" or operand in fx.node.map_arg(user.kwargs, lambda x: x).values():
        return False
    args = fx.node.map_arg(user.args, lambda x: value if x is operand else x.meta["val"])
    try:
        new = user.target(*args, **fx.node.map_arg(user.kwargs, lambda x: x.meta["val"]))
    except (RuntimeError, ValueError):
        return False
    return _alike(user.meta["val"], new)
