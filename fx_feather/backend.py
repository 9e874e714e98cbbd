"""Backends: from the graph of a local function to something that runs fast, each distinct function made once."""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.passes.split_module import split_module

from .reuse import reuse

Runnable = Callable[..., list[torch.Tensor]]

#: Names of the backends: `eager` runs the graph's own operators, which give the bits that the graph says, except that
#: sums at the end of pointwise functions are taken in another order; `inductor` fuses operators.
BACKENDS = ("eager", "inductor")

#: Operators that compute each element from the elements at its place, besides those that torch tags as pointwise.
POINTWISE = {
    torch.ops.aten._to_copy.default,
    torch.ops.aten.alias.default,
    torch.ops.aten.clone.default,
    torch.ops.aten.zeros_like.default,
    torch.ops.aten.ones_like.default,
}

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
    if backend == "eager":
        frugal = fx.Graph()
        frugal.output(frugal.graph_copy(graph, {}))
        reuse(frugal)
        forward = fx.GraphModule(constants, frugal).forward
        return tiled(graph, forward) or forward
    module = fx.GraphModule(constants, graph)
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


#: Elements of a tile: what is between the operators then takes a few MiB however large a leaf is. Smaller ones would
#: fit the second-level cache, but calls of operators cost more than that saves.
TILE = 1 << 18


def tiled(graph: fx.Graph, forward: Runnable) -> Runnable | None:
    """Runs a pointwise function tile by tile on a CPU, so that what is between its operators takes little memory.

    The results of pointwise operators are the same bits; a sum over all elements is taken tile by tile.

    Returns:
        None for a function that is not pointwise, or too small to gain.
    """
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    values = [n.meta.get("val") for n in graph.nodes if n.op in ("placeholder", "call_function")]
    single = [v for v in values if isinstance(v, torch.Tensor)]
    if len(nodes) < 3 or any(v is None for v in values):
        return None
    shape = max((v.shape for v in single), key=lambda s: s.numel())
    outs = list(graph.output_node().args[0])
    sums = [n.target is torch.ops.aten.sum.default for n in outs]
    summed = {n for n, is_sum in zip(outs, sums, strict=True) if is_sum}
    # A sum is known when all tiles are done, and each element is in one tile.
    last = all(u.op == "output" for n in summed for u in n.users)
    over_all = all(n.args[0].meta["val"].shape == shape for n in summed)
    pointwise = last and over_all and all(is_pointwise(n) for n in nodes if n not in summed)
    fits = all(v.shape == shape or v.ndim == 0 for v in single)
    scalar = any(o.meta["val"].ndim == 0 for o, s in zip(outs, sums, strict=True) if not s)
    if not pointwise or not fits or scalar or shape.numel() < 2 * TILE:
        return None
    size, dtypes = shape.numel(), [o.meta["val"].dtype for o in outs]
    tiles = -(-size // TILE)
    before, inside, scalars = _apart(graph)

    def run(*xs: torch.Tensor) -> list[torch.Tensor]:
        if any(x.device.type != "cpu" or not x.is_contiguous() for x in xs):
            return forward(*xs)
        flat = [x.view(-1) if x.ndim else x for x in xs]
        whole = [torch.empty(tiles if is_sum else size, dtype=d) for d, is_sum in zip(dtypes, sums, strict=True)]
        once = before(*(flat[i] for i in scalars))
        operands = [x.split(TILE) for x in flat if x.ndim]
        results = [w.split(1 if is_sum else TILE) for w, is_sum in zip(whole, sums, strict=True)]
        for part, to in zip(zip(*operands, strict=True), zip(*results, strict=True), strict=True):
            inside(*once, *part, *to)
        return [w.sum() if is_sum else w.view(shape) for w, is_sum in zip(whole, sums, strict=True)]

    return run


def _apart(graph: fx.Graph) -> tuple[Runnable, Runnable, list[int]]:
    """Parts what is computed from 0-dim values alone, once for all tiles, from the rest.

    Returns:
        The first part, from the 0-dim operands; the second, from the first's results, the other operands, and where to
        write what it gives; and which operands are 0-dim.
    """
    given = [n for n in graph.nodes if n.op == "placeholder"]
    scalars = [i for i, n in enumerate(given) if n.meta["val"].ndim == 0]
    small = {given[i] for i in scalars}
    for n in graph.nodes:
        if n.op == "call_function" and n.all_input_nodes and all(a in small for a in n.all_input_nodes):
            small.add(n)
    shared = [n for n in graph.nodes if n in small and any(u not in small for u in n.users)]
    first, second = fx.Graph(), fx.Graph()
    env: dict[fx.Node, fx.Node] = {given[i]: first.placeholder(f"s{i}") for i in scalars}
    for n in graph.nodes:
        if n in small and n.op == "call_function":
            env[n] = first.node_copy(n, env.__getitem__)
    first.output([env[n] for n in shared])
    inner: dict[fx.Node, fx.Node] = {n: second.placeholder(f"s{i}") for i, n in enumerate(shared)}
    inner.update({n: second.placeholder(f"x{i}") for i, n in enumerate(given) if i not in scalars})
    for n in graph.nodes:
        if n.op == "call_function" and n not in small:
            inner[n] = second.node_copy(n, inner.__getitem__)
    _write(second, [inner[o] for o in graph.output_node().args[0]])
    reuse(second)
    return fx.GraphModule({}, first).forward, fx.GraphModule({}, second).forward, scalars


def _write(graph: fx.Graph, results: list[fx.Node]) -> None:
    """Ends a graph with its results written into further operands, by the operators that make them where these can."""
    last = next(n for n in reversed(graph.nodes) if n.op == "placeholder")
    with graph.inserting_after(last):
        to = [graph.placeholder(f"to{i}") for i in reversed(range(len(results)))][::-1]
    where: dict[fx.Node, fx.Node] = {}
    for result, p in zip(results, to, strict=True):
        if result in where or not result.all_input_nodes:
            graph.call_function(torch.ops.aten.copy_.default, (p, result))
        else:
            where[result] = p
    for n in list(graph.nodes):
        items = sorted((u for u in n.users if u.target is operator.getitem), key=lambda u: u.args[1])
        made = items or [n]
        into = _writing(n.target, len(made)) if n.op == "call_function" and all(m in where for m in made) else None
        if into is not None:
            n.target, names = into
            n.kwargs = {**n.kwargs, **{name: where.pop(m) for name, m in zip(names, made, strict=True)}}
    for result, p in where.items():
        graph.call_function(torch.ops.aten.copy_.default, (p, result))
    graph.output([])


def _writing(target: Any, count: int) -> tuple[Any, list[str]] | None:
    """The overload of an operator that writes its results into operands, and the names of these, if there is one."""
    schema = getattr(target, "_schema", None)
    if schema is None or target is torch.ops.aten.sum.default or len(schema.returns) != count:
        return None
    own = [(a.name, str(a.type)) for a in schema.arguments]
    for name in target.overloadpacket.overloads():
        found = getattr(target.overloadpacket, name)
        arguments = found._schema.arguments
        outs = [a.name for a in arguments if a.is_out]
        if len(outs) == count and [(a.name, str(a.type)) for a in arguments if not a.is_out] == own:
            return found, outs
    return None


def is_pointwise(n: fx.Node) -> bool:
    """Whether a node computes each element of its results from the elements at the same place."""
    if n.target is operator.getitem:
        return is_pointwise(n.args[0])
    tags = getattr(n.target, "tags", ())
    return n.target in POINTWISE or (torch.Tag.pointwise in tags and not n.target._schema.is_mutable)


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
