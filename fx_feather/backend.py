"""Backends: from the graph of a local function to something that runs fast, each distinct function made once."""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.passes.split_module import split_module

Runnable = Callable[..., list[torch.Tensor]]

#: Names of the backends: `eager` runs operator by operator, bit for bit as the graph says; `inductor` fuses them.
BACKENDS = ("eager", "inductor")

_MOVES = {
    torch.ops.aten.view.default,
    torch.ops.aten.t.default,
    torch.ops.aten.transpose.int,
    torch.ops.aten.permute.default,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.narrow.default,
    torch.ops.aten.unsqueeze.default,
    torch.ops.aten.squeeze.dim,
    torch.ops.aten.expand.default,
}


def build(graph: fx.Graph, constants: dict[str, torch.Tensor], backend: str) -> Runnable:
    """Makes a graph runnable.

    Args:
        graph: operators of torch, and Python functions in the place of collectives.
        constants: tensors that the graph names.
        backend: one of `BACKENDS`. With `inductor` the stretches between collectives are compiled; its results are
            close to those of `eager`, not the same bits.
    """
    module = fx.GraphModule(constants, graph)
    if backend == "eager":
        return module.forward
    if not any(_is_collective(n) for n in graph.nodes):
        return _compiled(module) if _computes(graph) else module.forward
    part, before = 0, False

    def piece(n: fx.Node) -> int:
        nonlocal part, before
        now = _is_collective(n)
        part += now or before
        before = now
        return part

    split = split_module(module, torch.nn.Module(), piece)
    for name, inner in list(split.named_children()):
        if isinstance(inner, fx.GraphModule) and _computes(inner.graph):
            setattr(split, name, _Forward(_compiled(inner)))
    return split.forward


class _Forward(torch.nn.Module):
    """A compiled function in the place of a module."""

    def __init__(self, fn: Callable[..., Any]):
        super().__init__()
        self.forward = fn


def _compiled(module: fx.GraphModule) -> Callable[..., Any]:
    return torch.compile(module.forward, backend="inductor", fullgraph=True, dynamic=False)


def _is_collective(n: fx.Node) -> bool:
    return (
        n.op == "call_function"
        and not isinstance(n.target, torch._ops.OpOverload)
        and n.target.__module__ != "_operator"
    )


def _computes(graph: fx.Graph) -> bool:
    """Whether there is anything to fuse: compiling costs seconds, and a copy is as fast without."""
    work = [n for n in graph.nodes if n.op == "call_function" and n.target not in _MOVES]
    return len(work) > 1
