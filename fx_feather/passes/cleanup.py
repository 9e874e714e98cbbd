"""Cleanup: removes what computes nothing (dead nodes, aliases, views and casts to what a value already is)."""

import torch
from torch import fx

aten = torch.ops.aten

_ALIASES = {aten.alias.default, aten.detach.default, aten.lift_fresh.default}
_RESHAPES = {aten.view.default, aten._unsafe_view.default, aten.expand.default, aten.reshape.default}
#: Operators of one tensor and a number, which give the same bits before a value is repeated as after.
_SCALED = {aten.mul.Scalar, aten.div.Scalar}
_CASTS = {aten._to_copy.default}


def cleanup(graph: fx.Graph) -> None:
    """Edits a local graph in place; keeps results bit for bit."""
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
        n.target, n.args = aten.permute.default, (base, order)


def _one_view(n: fx.Node) -> None:
    """A view with a dim of size 1 more or less is a view."""
    first = n.args[0]
    if first.target is aten.view.default and first.meta["val"].shape != n.meta["val"].shape:
        n.target, n.args = aten.view.default, (first.args[0], list(n.meta["val"].shape))
        _view_of_first(n)


def _view_of_first(n: fx.Node) -> None:
    """A view of a view is a view of the first; dims of size 1 in between have no say in it."""
    first = n.args[0]
    while first.target in _ONES or (first.target is aten.view.default and first.args[0].meta["val"].is_contiguous()):
        first = first.args[0]
    n.update_arg(0, first)


def _is_identity(n: fx.Node) -> bool:
    if n.target in _RESHAPES:
        return _same_place(n)
    if n.target in _CASTS:
        return _same_kind(n)
    return n.target in _ALIASES or (n.target is aten.pow.Tensor_Scalar and n.args[1] == 1)


def _same_place(n: fx.Node) -> bool:
    a, b = n.args[0].meta["val"], n.meta["val"]
    return a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype


def _same_kind(n: fx.Node) -> bool:
    a, b = n.args[0].meta["val"], n.meta["val"]
    return a.dtype == b.dtype and a.device == b.device and a.stride() == b.stride()


def _scale_before_expand(graph: fx.Graph, n: fx.Node) -> None:
    """Turns a scaled `expand` into the `expand` of what is scaled, which is smaller."""
    expand = n.args[0]
    small = expand.args[0]
    with graph.inserting_before(n):
        scaled = graph.call_function(n.target, (small, *n.args[1:]))
        scaled.meta["val"] = small.meta["val"].new_empty(small.meta["val"].shape)
        wide = graph.call_function(aten.expand.default, (scaled, *expand.args[1:]))
        wide.meta["val"] = scaled.meta["val"].expand(expand.args[1])
    n.replace_all_uses_with(wide)
    graph.erase_node(n)
