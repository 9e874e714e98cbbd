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
from .tiles import Runnable, Tiles, written_over

#: Names of the backends: `eager` runs the graph's own operators, which give the bits that the graph says, except that
#: sums at the end of pointwise functions are taken in another order; `inductor` fuses operators.
BACKENDS = ("eager", "inductor")

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
    """Code of a function that takes its operands out of a list.

    Operators are called by names of their own, `globals`: to look one up as `torch.ops.aten.add.Tensor`, and to call it
    through its Python object, took 0.6 us, where a sum of small tensors took 1.5.
    """

    def __init__(self, graph: fx.Graph):
        super().__init__()
        ops = dict.fromkeys(n.target for n in graph.nodes if isinstance(n.target, torch._ops.OpOverload))
        self.globals = {f"_feather_op{k}": op._op for k, op in enumerate(ops)}
        self._names = {f"torch.ops.{op}(": name for name, op in zip(self.globals, ops, strict=True)}
        self._body_transformer = self._by_own_names

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **options: Any) -> str:
        names = [v.split(":")[0].strip() for v in free_vars if v != "self"]
        taken = f"\n    {', '.join(names)}, = given; given.clear()" if names else ""
        return f"def {self._func_name}(self, given){maybe_return_annotation}:{taken}"

    def _by_own_names(self, body: list[str]) -> list[str]:
        text = "\0".join(body)
        for path, name in self._names.items():
            text = text.replace(path, f"{name}(")
        return text.split("\0")


def taking_list(constants: dict[str, torch.Tensor], graph: fx.Graph) -> Runnable:
    """A graph as a function whose attribute `boxed` takes the operands as a list, and empties it.

    Nobody else then holds an operand while the function runs: it is freed after its last use, not at the end, and what
    comes next lies in memory that is still in the cache.
    """
    code = _FromList(graph)
    graph.set_codegen(code)
    boxed = fx.GraphModule(constants, graph).forward
    boxed.__globals__.update(code.globals)

    def run(*xs: torch.Tensor) -> list[torch.Tensor]:
        return boxed(list(xs))

    run.boxed = boxed  # type: ignore[attr-defined]
    return run


def tiled(graph: fx.Graph, forward: Runnable) -> Runnable | None:
    """Runs a pointwise function tile by tile on a CPU, so that what is between its operators takes little memory.

    The results of pointwise operators are the same bits, but for a fused kernel that rounds otherwise in the few
    elements that fill no vector; a sum over all elements is taken tile by tile.

    Returns:
        None for a function that is not pointwise, or too small to gain.
    """
    tiles = Tiles.of(graph, forward)
    return tiles.run if tiles is not None and tiles.are_worth_it else None


@dataclasses.dataclass(frozen=True)
class Overwriting:
    """A form of a function that writes over operands which nobody else needs.

    Attributes:
        over: the numbers of those operands.
        run: takes the operands as a list, which it empties, and which of `over` may be written over.
        whole: whether it writes over all of them or none.
    """

    over: tuple[int, ...]
    run: Callable[[list[torch.Tensor], Collection[int]], list[torch.Tensor]]
    whole: bool

    def free(self, is_free: Callable[[int], bool]) -> list[int]:
        """Those of `over` that nobody else needs; none, where all are needed and one is not free."""
        if self.whole:
            return list(self.over) if all(map(is_free, self.over)) else []
        return [k for k in self.over if is_free(k)]


def overwriting(graph: fx.Graph) -> Overwriting | None:
    """A pointwise function that writes its results over operands, as optimizers do.

    Returns:
        None if there is no such form, and if a sum is among its results: which form runs must not change it.
    """
    tiles = Tiles.of(graph)
    if tiles is None or not tiles.over or any(tiles.sums):
        return None
    return Overwriting(tuple(tiles.over.values()), tiles.run_over, False)


@dataclasses.dataclass(frozen=True)
class Together:
    """A form of a function that runs many calls of it at once.

    Attributes:
        over: the numbers of the operands that it writes over, in each call.
        run: takes the operands of all calls, and gives their results.
    """

    over: frozenset[int]
    run: Callable[[Sequence[Sequence[torch.Tensor]]], list[list[torch.Tensor]]]


def together(graph: fx.Graph) -> Together | None:
    """A function that is one operator, which can run many calls at once; None for others.

    An operator says so by an attribute `at_once`, a function from the arguments of all calls to their results, which
    are written over what the operator's overload `out` may write over. It may be given parts of operands: a Python
    function in the place of a collective that takes a rank's own part names by `view` what takes it without a copy.
    """
    given = {n: k for k, n in enumerate(n for n in graph.nodes if n.op == "placeholder")}
    nodes = [n for n in graph.nodes if n.op not in ("placeholder", "output") and n.target is not operator.getitem]
    main, parts = (nodes[-1], nodes[:-1]) if nodes else (None, [])
    many = getattr(main.target, "at_once", None) if main is not None else None
    cut = {n: n.target.view for n in parts if hasattr(n.target, "view") and set(n.users) == {main}}
    known = {*given, *cut}
    if many is None or main is None or main.kwargs or not known.issuperset([*parts, *main.all_input_nodes]):
        return None
    picks: list[int | None] = []
    for out in graph.output_node().args[0]:
        if out is not main and (out.target is not operator.getitem or out.args[0] is not main):
            return None
        picks.append(None if out is main else out.args[1])
    over = written_over(main)
    if any(n not in given or main.args.count(n) > 1 for n in over):
        return None

    def argument(a: Any) -> Callable[[Sequence[torch.Tensor]], Any]:
        if a in cut:
            take, k = cut[a], given[a.args[0]]
            return lambda row: take(row[k])
        if isinstance(a, fx.Node):
            return operator.itemgetter(given[a])
        return lambda row: a

    arguments = [argument(a) for a in main.args]

    def run(rows: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
        made = many([[take(row) for take in arguments] for row in rows])
        return [[m if k is None else m[k] for k in picks] for m in made]

    return Together(frozenset(given[n] for n in over), run)


def consuming(graph: fx.Graph, constants: dict[str, torch.Tensor], used_up: Collection[int]) -> Overwriting | None:
    """Any function, whose operators write over operands that are used up, as a backward does with what was kept for it.

    Args:
        graph: as for `build`.
        constants: tensors that the graph names.
        used_up: numbers of the operands that nobody needs after the call.

    Returns:
        None if no operator can, and for functions that run in tiles: which form runs must not change a sum.
    """
    tiles = Tiles.of(graph)
    if tiles is not None and tiles.are_worth_it:
        return None
    frugal = fx.Graph()
    frugal.output(frugal.graph_copy(graph, {}))
    operands = [n for n in frugal.nodes if n.op == "placeholder"]
    written = reuse(frugal, {operands[k] for k in used_up})
    over = tuple(k for k, n in enumerate(operands) if n in written)
    if not over:
        return None
    boxed = taking_list(constants, frugal).boxed  # type: ignore[attr-defined]
    return Overwriting(over, lambda xs, _: boxed(xs), True)


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
