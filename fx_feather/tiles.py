"""Tiles: pointwise functions that run on a part of the elements at a time, and write where they are told."""

import dataclasses
import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import fx

from .reuse import reuse

Runnable = Callable[..., list[torch.Tensor]]

#: Operators that compute each element from the elements at its place, besides those that torch tags as pointwise.
POINTWISE = {
    torch.ops.aten._to_copy.default,
    torch.ops.aten.alias.default,
    torch.ops.aten.clone.default,
    torch.ops.aten.zeros_like.default,
    torch.ops.aten.ones_like.default,
}

#: Elements of a tile: what is between the operators then takes a few MiB however large a leaf is. Smaller ones would
#: fit the second-level cache, but calls of operators cost more than that saves.
TILE = 1 << 18


@dataclasses.dataclass
class Tiles:
    """A pointwise function in the form that runs on a part of the elements at a time.

    Attributes:
        forward: the function on whole values.
        shape: of what is cut; other operands have no dims.
        dtypes, sums: of each result, its dtype and whether it is the sum of all elements.
        before: computes what depends on operands without dims alone, once for all tiles.
        inside: writes the results of one tile where it is told.
        scalars: numbers of the operands without dims.
        over: for results that can be written over an operand, by the operator that makes them, that operand's number.
            What an operator writes and nobody reads counts as a result after the others.
        unread: the dtypes of what nobody reads.
    """

    forward: Runnable
    shape: torch.Size
    dtypes: list[torch.dtype]
    sums: list[bool]
    before: Runnable
    inside: Runnable
    scalars: list[int]
    over: dict[int, int]
    unread: list[torch.dtype]

    @classmethod
    def of(cls, graph: fx.Graph, forward: Runnable | None = None) -> "Tiles | None":
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

    def run_over(self, xs: list[torch.Tensor], over: Collection[int]) -> list[torch.Tensor]:
        """The results, some of them written over those operands that may be."""
        given = list(xs)
        xs.clear()
        return self._run(given, {i: k for i, k in self.over.items() if k in over})

    def _run(self, xs: Sequence[torch.Tensor], over: dict[int, int]) -> list[torch.Tensor]:
        if any(x.device.type != "cpu" or not x.is_contiguous() for x in xs):
            return self.forward(*xs)
        tiles = -(-self.shape.numel() // TILE)
        whole = [
            xs[over[i]] if i in over else torch.empty(tiles if is_sum else self.shape, dtype=d)
            for i, (d, is_sum) in enumerate(zip(self.dtypes, self.sums, strict=True))
        ]
        # What nobody reads needs the memory of one tile.
        least = self.shape if tiles == 1 else TILE
        unread = [
            xs[over[i]] if i in over else torch.empty(least, dtype=d) for i, d in enumerate(self.unread, len(whole))
        ]
        once = self.before(*(xs[i] for i in self.scalars))
        if tiles == 1:
            self.inside(*once, *(x for x in xs if x.ndim), *whole, *unread)
        else:
            operands = [x.view(-1).split(TILE) for x in xs if x.ndim]
            results = [w.view(-1).split(1 if is_sum else TILE) for w, is_sum in zip(whole, self.sums, strict=True)]
            sizes = [len(part) for part in operands[0]]
            results += [
                x.view(-1).split(TILE) if i in over else tuple(x[:n] for n in sizes)
                for i, x in enumerate(unread, len(whole))
            ]
            for part, to in zip(zip(*operands, strict=True), zip(*results, strict=True), strict=True):
                self.inside(*once, *part, *to)
        return [w.sum() if is_sum else w for w, is_sum in zip(whole, self.sums, strict=True)]


def _apart(graph: fx.Graph) -> tuple[Runnable, Runnable, list[int], dict[int, int], list[torch.dtype]]:
    """The last five fields of `Tiles`.

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
    unread = [r for n in graph.nodes if n not in small for r in _unread(n)]
    to = [second.placeholder(f"to{i}") for i in range(len(results) + len(unread))]
    for n in graph.nodes:
        if n.op == "call_function" and n not in small:
            inner[n] = second.node_copy(n, inner.__getitem__)
    over = _write(second, [inner[o] for o in results], [(inner[n], k) for n, k in unread], to)
    reuse(second)
    number = {inner[n]: i for i, n in enumerate(given) if i not in scalars}
    pairs = {i: number[n] for i, n in over.items() if n in number}
    dtypes = [n.meta["val"][k].dtype for n, k in unread]
    return fx.GraphModule({}, first).forward, fx.GraphModule({}, second).forward, scalars, pairs, dtypes


#: One of the results of an operator: the operator's node, and which one.
_Result = tuple[fx.Node, int]


def _results(n: fx.Node) -> list[_Result]:
    schema = getattr(n.target, "_schema", None)
    return [(n, k) for k in range(len(schema.returns) if schema is not None else 1)]


def _unread(n: fx.Node) -> list[_Result]:
    """Of an operator with several results, which it can write into operands, those that nobody reads."""
    results = _results(n)
    if len(results) == 1 or _writing(n.target, len(results)) is None:
        return []
    read = {u.args[1] for u in n.users if u.users}
    return [r for r in results if r[1] not in read]


def _write(graph: fx.Graph, results: list[fx.Node], unread: list[_Result], to: list[fx.Node]) -> dict[int, fx.Node]:
    """Ends a graph with its results written into operands, by the operators that make them where these can.

    Args:
        graph: the graph.
        results: what is written into the first of `to`.
        unread: what is written into the others, if at all.
        to: operands.

    Returns:
        for results that their operator may write over one of its own operands, which nobody else reads, that operand.
        An operator says so by the name of its argument: `to_x` may be `x` itself.
    """
    made_by = [(n.args[0], n.args[1]) if n.target is operator.getitem else (n, 0) for n in results]
    place: dict[_Result, int] = {}
    for i, result in enumerate([*made_by, *unread]):
        place.setdefault(result, i)
    written: set[int] = set()
    over: dict[int, fx.Node] = {}
    for n in list(graph.nodes):
        made = _results(n) if n.op == "call_function" else []
        into = _writing(n.target, len(made)) if made and all(m in place for m in made) else None
        if into is None:
            continue
        own = _operands_over(n, into[1])
        n.target, names = into
        n.kwargs = {**n.kwargs, **{name: to[place[m]] for name, m in zip(names, made, strict=True)}}
        written.update(place[m] for m in made)
        for x, m in zip(own, made, strict=True):
            if x is None or x.op != "placeholder" or x in results:
                continue
            if list(x.users) == [n] and n.args.count(x) == 1:
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


def _operands_over(n: fx.Node, names: list[str]) -> list[fx.Node | None]:
    """For each argument that takes a result the operand that it may be."""
    operands = {f"to_{a.name}": x for a, x in zip(n.target._schema.arguments, n.args, strict=False)}
    return [operands.get(name) for name in names]


def written_over(n: fx.Node) -> list[fx.Node]:
    """The operands over which an operator may write its results."""
    into = _writing(n.target, len(_results(n)))
    return [x for x in _operands_over(n, into[1]) if x is not None] if into is not None else []


def is_pointwise(n: fx.Node) -> bool:
    """Whether a node computes each element of its results from the elements at the same place."""
    if n.target is operator.getitem:
        return is_pointwise(n.args[0])
    tags = getattr(n.target, "tags", ())
    return n.target in POINTWISE or (torch.Tag.pointwise in tags and not n.target._schema.is_mutable)
