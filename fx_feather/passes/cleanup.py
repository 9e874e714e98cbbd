"""Cleanup: removes what computes nothing (dead nodes, aliases, views and casts to what a value already is)."""

import torch
from torch import fx

aten = torch.ops.aten

_ALIASES = {aten.alias.default, aten.detach.default, aten.lift_fresh.default}
_RESHAPES = {aten.view.default, aten._unsafe_view.default, aten.expand.default, aten.reshape.default}
_CASTS = {aten._to_copy.default}


def cleanup(graph: fx.Graph) -> None:
    """Edits a local graph in place; keeps results bit for bit."""
    for n in list(graph.nodes):
        if n.op != "call_function" or not n.args or not isinstance(n.args[0], fx.Node):
            continue
        if n.target in _ALIASES or (n.target in _RESHAPES and _same_place(n)) or (n.target in _CASTS and _same_kind(n)):
            n.replace_all_uses_with(n.args[0])
            graph.erase_node(n)
        elif n.target is aten.view.default and n.args[0].target is aten.view.default:
            first = n.args[0].args[0]
            if first.meta["val"].is_contiguous():
                n.update_arg(0, first)  # a view of a view is a view of the first
    graph.eliminate_dead_code()


def _same_place(n: fx.Node) -> bool:
    a, b = n.args[0].meta["val"], n.meta["val"]
    return a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype


def _same_kind(n: fx.Node) -> bool:
    a, b = n.args[0].meta["val"], n.meta["val"]
    return a.dtype == b.dtype and a.device == b.device and a.stride() == b.stride()
