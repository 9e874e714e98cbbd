"""Matmuls by another library: chosen when everything else is settled, for what they are and how their operands lie."""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ..errors import BackendError
from ..kernels import has_onednn
from ..settings import OneOf, check
from .cleanup import cleanup

aten = torch.ops.aten

#: Ways to multiply matrices; the first is always there.
MATMULS = ("aten", "onednn")

#: Multiplications from which oneDNN is called: a call takes about 13 us more than one of `torch.mm`.
LEAST_WORK = 1 << 24

#: Columns of products from which it pays to lay their left operand out anew. In the steps of README's benchmark laying
#: out takes 1.3 to 2.8 ns a number, and each column then saves 3 to 4 ps a number.
LEAST_COLUMNS = 640

_VIEWS = {aten.view.default, aten.t.default, aten.transpose.int, aten.permute.default, aten.squeeze.dim}


def check_matmul(matmul: Any, device: str) -> None:
    """Raises BackendError if matrices can't be multiplied in this way on this device."""
    there = MATMULS if has_onednn() and device == "cpu" else MATMULS[:1]
    rule = f"on {device} this PyTorch multiplies matrices by {' or '.join(there)}"
    check(BackendError, "compile_step", {"matmul": matmul}, [("matmul", OneOf(there), rule, "matmul='aten'")])


def by_onednn(graph: fx.Graph) -> None:
    """Edits a graph in place: large products of two matrices in float32 become `fx_feather::onednn_mm`.

    Doesn't keep results bit for bit, so it is asked for.

    The gradient of a weight is `x.t() @ g`, whose left operand lies column by column, as oneDNN doesn't take it. `x` is
    laid out anew where that pays: once for all products that it is in, such as those of queries, keys and values. What
    is larger than all else in them, such as the gradient of logits, is not: it would take too much memory.
    """
    products = [n for n in graph.nodes if _is_large_product(n)]
    turned: dict[Any, list[fx.Node]] = {}
    for n in products:
        x = n.args[0].meta["val"]
        if not x.is_contiguous() and x.mT.is_contiguous():
            turned.setdefault(_value(n.args[0]), []).append(n)
    laid: dict[Any, fx.Node] = {}
    for value, users in turned.items():
        columns = sum(n.meta["val"].shape[-1] for n in users)
        rest = sum(n.meta["val"].numel() + n.args[1].meta["val"].numel() for n in users)
        if columns >= LEAST_COLUMNS and users[0].args[0].meta["val"].numel() <= rest:
            with graph.inserting_before(users[0]):
                left = _matrix(graph, users[0].args[0])
                laid[value] = _call(graph, aten.clone.default, left, memory_format=torch.contiguous_format)
    for n in products:
        with graph.inserting_before(n):
            left, right = n.args
            a = laid.get(_value(left)) or _matrix(graph, left)
            product = _call(graph, torch.ops.fx_feather.onednn_mm.default, a, _matrix(graph, right))
            batched = n.meta["val"].ndim == 3
            n.replace_all_uses_with(_call(graph, aten.unsqueeze.default, product, 0) if batched else product)
        graph.erase_node(n)
    if products:
        cleanup(graph)


def _is_large_product(n: fx.Node) -> bool:
    """Whether a node is a product of two matrices, or a batch of one, that is worth a call of oneDNN."""
    if n.target is not aten.mm.default and n.target is not aten.bmm.default:
        return False
    a, b, out = n.args[0].meta["val"], n.args[1].meta["val"], n.meta["val"]
    single = out.ndim == 2 or out.shape[0] == 1
    lies = b.is_contiguous() or b.mT.is_contiguous()
    return single and lies and out.dtype == torch.float32 and out.numel() * a.shape[-1] >= LEAST_WORK


def _value(n: fx.Node) -> Any:
    """What is equal for nodes that are the same view of the same node."""
    return (n.target, _value(n.args[0]), repr(n.args[1:])) if n.target in _VIEWS else n


def _matrix(graph: fx.Graph, n: fx.Node) -> fx.Node:
    return n if n.meta["val"].ndim == 2 else _call(graph, aten.squeeze.dim, n, 0)


def _call(graph: fx.Graph, target: Callable[..., Any], x: fx.Node, *args: Any, **kwargs: Any) -> fx.Node:
    n = graph.call_function(target, (x, *args), kwargs)
    with torch.no_grad():
        n.meta["val"] = target(*fx.node.map_arg(n.args, lambda a: a.meta["val"]), **kwargs)
    return n
