"""Backends: from the graph of a local function to something that runs fast, each distinct function made once."""

import dataclasses
import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.passes.split_module import split_module

from .inductor import compiled
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
    operator.getitem,
    torch.ops.aten.cat.default,
    torch.ops.aten.clone.default,
    torch.ops.aten.split_with_sizes.default,
    torch.ops.aten.stack.default,
    torch.ops.aten.unbind.int,
    torch.ops.aten._unsafe_view.default,
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
        forward = taking_list(constants, frugal)
        return tiled(graph, forward) or forward
    module = fx.GraphModule(constants, graph)
    if not any(_is_collective(n) for n in graph.nodes):
        return compiled(module) if computes(graph) else module.forward
    part, before = 0, False
    parts: dict[fx.Node, int] = {}

    def piece(n: fx.Node) -> int:
        nonlocal part, before
        if n.target is operator.getitem:
            # With what it is an item of: only tensors pass from piece to piece.
            parts[n] = parts.get(n.args[0], part)
        else:
            now = _is_collective(n)
            part += now or before
            before = now
            parts[n] = part
        return parts[n]

    split = split_module(module, torch.nn.Module(), piece)
    for name, inner in list(split.named_children()):
        if isinstance(inner, fx.GraphModule) and computes(inner.graph):
            setattr(split, name, _Forward(compiled(inner)))
    return split.forward


class _FromList(fx.graph.CodeGen):
    """Code of a function that takes its operands out of a list."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **options: Any) -> str:
        names = [v.split(":")[0].strip() for v in free_vars if v != "self"]
        taken = f"\n    {', '.join(names)}, = given; given.clear()" if names else ""
        return f"def {self._func_name}(self, given){maybe_return_annotation}:{taken}"


def taking_list(constants: dict[str, torch.Tensor], graph: fx.Graph) -> Runnable:
    """A graph as a function whose attribute `boxed` takes the operands as a list, and empties it.

    Nobody else then holds an operand while the function runs: it is freed after its last use, not at the end, and what
    comes next lies in memory that is still in the cache.
    """
    graph.set_codegen(_FromList())
    boxed = fx.GraphModule(constants, graph).forward

    def run(*xs: torch.Tensor) -> list[torch.Tensor]:
        return boxed(list(xs))

    run.boxed = boxed  # type: ignore[attr-defined]
    return run


#: Elements of a tile: what is between the operators then takes a few MiB however large a leaf is. Smaller ones would
#: fit the second-level cache, but calls of operators cost more than that saves.
TILE = 1 << 18


def tiled(graph: fx.Graph, forward: Runnable) -> Runnable | None:
    """Runs a pointwise function tile by tile on a CPU, so that what is between its operators takes little memory.

    The results of pointwise operators are the same bits, but for a fused kernel that rounds otherwise in the few
    elements that fill no vector; a sum over all elements is taken tile by tile.

    Returns:
        None for a function that is not pointwise, or too small to gain.
    """
    tiles = _Tiles.of(graph, forward)
    return tiles.run if tiles is not None and tiles.are_worth_it else None


@dataclasses.dataclass(frozen=True)
class Overwriting:
    """A form of a function that writes over operands which nobody else needs.

    Attributes:
        over: the numbers of those operands.
        run: takes the operands as a list, and empties it.
    """

    over: tuple[int, ...]
    run: Callable[[list[torch.Tensor]], list[torch.Tensor]]


def overwriting(graph: fx.Graph) -> Overwriting | None:
    """A pointwise function that writes its results over operands, as optimizers do; None if there is no such form."""
    tiles = _Tiles.of(graph)
    return Overwriting(tuple(tiles.over.values()), tiles.run_over) if tiles is not None and tiles.over else None


def consuming(graph: fx.Graph, constants: dict[str, torch.Tensor], used_up: Collection[int]) -> Overwriting | None:
    """Any function, whose operators write over operands that are used up, as a backward does with what was kept for it.

    Args:
        graph: as for `build`.
        constants: tensors that the graph names.
        used_up: numbers of the operands that nobody needs after the call.

    Returns:
        None if no operator can, and for functions that run in tiles: which form runs must not change a sum.
    """
    tiles = _Tiles.of(graph)
    if tiles is not None and tiles.are_worth_it:
        return None
    frugal = fx.Graph()
    frugal.output(frugal.graph_copy(graph, {}))
    operands = [n for n in frugal.nodes if n.op == "placeholder"]
    written = reuse(frugal, {operands[k] for k in used_up})
    over = tuple(k for k, n in enumerate(operands) if n in written)
    return Overwriting(over, taking_list(constants, frugal).boxed) if over else None  # type: ignore[attr-defined]


@dataclasses.dataclass
class _Tiles:
    """A pointwise function in the form that runs on a part of the elements at a time.

    Attributes:
        forward: the function on whole values.
        shape: of what is cut; other operands have no dims.
        dtypes, sums: of each result, its dtype and whether it is the sum of all elements.
        before: computes what depends on operands without dims alone, once for all tiles.
        inside: writes the results of one tile where it is told.
        scalars: numbers of the operands without dims.
        over: for results that can be written over an operand, by the operator that makes them, that operand's number.
    """

    forward: Runnable
    shape: torch.Size
    dtypes: list[torch.dtype]
    sums: list[bool]
    before: Runnable
    inside: Runnable
    scalars: list[int]
    over: dict[int, int]

    @classmethod
    def of(cls, graph: fx.Graph, forward: Runnable | None = None) -> "_Tiles | None":
        """None for a function that is not pointwise."""
        nodes = [n for n in graph.nodes if n.op == "call_function"]
        values = [n.meta.get("val") for n in graph.nodes if n.op in ("placeholder", "call_function")]
        single = [v for v in values if isinstance(v, torch.Tensor)]
        if len(nodes) < 3 or any(v is None for v in values) or any(n.op == "get_attr" for n in graph.nodes):
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
        if not pointwise or not fits or scalar:
            return None
        return cls(
            forward or fx.GraphModule({}, graph).forward,
            shape,
            [o.meta["val"].dtype for o in outs],
            sums,
            *_apart(graph),
        )

    @property
    def are_worth_it(self) -> bool:
        """Whether there are several."""
        return self.shape.numel() >= 2 * TILE

    def run(self, *xs: torch.Tensor) -> list[torch.Tensor]:
        """The results."""
        return self._run(xs, {})

    def run_over(self, xs: list[torch.Tensor]) -> list[torch.Tensor]:
        """The results, some of them written over operands."""
        given = list(xs)
        xs.clear()
        return self._run(given, self.over)

    def _run(self, xs: Sequence[torch.Tensor], over: dict[int, int]) -> list[torch.Tensor]:
        if any(x.device.type != "cpu" or not x.is_contiguous() for x in xs):
            return self.forward(*xs)
        tiles = -(-self.shape.numel() // TILE)
        whole = [
            xs[over[i]] if i in over else torch.empty(tiles if is_sum else self.shape, dtype=d)
            for i, (d, is_sum) in enumerate(zip(self.dtypes, self.sums, strict=True))
        ]
        once = self.before(*(xs[i] for i in self.scalars))
        if tiles == 1:
            self.inside(*once, *(x for x in xs if x.ndim), *whole)
            return [w.sum() if is_sum else w for w, is_sum in zip(whole, self.sums, strict=True)]
        operands = [x.view(-1).split(TILE) for x in xs if x.ndim]
        results = [w.view(-1).split(1 if is_sum else TILE) for w, is_sum in zip(whole, self.sums, strict=True)]
        for part, to in zip(zip(*operands, strict=True), zip(*results, strict=True), strict=True):
            self.inside(*once, *part, *to)
        return [w.sum() if is_sum else w for w, is_sum in zip(whole, self.sums, strict=True)]


def _apart(graph: fx.Graph) -> tuple[Runnable, Runnable, list[int], dict[int, int]]:
    """The last four fields of `_Tiles`.

    The first function takes the operands without dims; the second what the first gives, the other operands, and where
    to write its results.
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
    results = list(graph.output_node().args[0])
    to = [second.placeholder(f"to{i}") for i in range(len(results))]
    for n in graph.nodes:
        if n.op == "call_function" and n not in small:
            inner[n] = second.node_copy(n, inner.__getitem__)
    over = _write(second, [inner[o] for o in results], to)
    reuse(second)
    number = {inner[n]: i for i, n in enumerate(given) if i not in scalars}
    pairs = {i: number[n] for i, n in over.items() if n in number}
    return fx.GraphModule({}, first).forward, fx.GraphModule({}, second).forward, scalars, pairs


def _write(graph: fx.Graph, results: list[fx.Node], to: list[fx.Node]) -> dict[int, fx.Node]:
    """Ends a graph with its results written into operands, by the operators that make them where these can.

    Returns:
        for results that their operator may write over one of its own operands, which nobody else reads, that operand.
        An operator says so by the name of its argument: `to_x` may be `x` itself.
    """
    place: dict[fx.Node, int] = {}
    for i, result in enumerate(results):
        if result.op == "call_function":
            place.setdefault(result, i)
    written: set[int] = set()
    over: dict[int, fx.Node] = {}
    for n in list(graph.nodes):
        items = sorted((u for u in n.users if u.target is operator.getitem), key=lambda u: u.args[1])
        made = items or [n]
        into = _writing(n.target, len(made)) if n.op == "call_function" and all(m in place for m in made) else None
        if into is None:
            continue
        operands = dict(zip((a.name for a in n.target._schema.arguments), n.args, strict=False))
        n.target, names = into
        n.kwargs = {**n.kwargs, **{name: to[place[m]] for name, m in zip(names, made, strict=True)}}
        written.update(place[m] for m in made)
        for name, m in zip(names, made, strict=True):
            x = operands.get(name.removeprefix("to_")) if name.startswith("to_") else None
            if x is not None and x.op == "placeholder" and list(x.users) == [n] and x not in results:
                over[place[m]] = x
    for i, result in enumerate(results):
        if i not in written:
            graph.call_function(torch.ops.aten.copy_.default, (to[i], result))
    graph.output([])
    return over


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


def _is_collective(n: fx.Node) -> bool:
    return (
        n.op == "call_function"
        and not isinstance(n.target, torch._ops.OpOverload)
        and n.target.__module__ != "_operator"
    )


def computes(graph: fx.Graph) -> bool:
    """Whether there is anything to fuse: compiling costs seconds, and a copy is as fast without."""
    work = [n for n in graph.nodes if n.op == "call_function" and n.target not in _MOVES and not _is_collective(n)]
    return len(work) > 1
