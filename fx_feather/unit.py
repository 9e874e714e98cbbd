"""Global programs: units of whole-tensor operators, and the calls that string them together."""

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from .mesh import Mesh
from .spec import Type


@dataclasses.dataclass(frozen=True)
class Aval:
    """Shape, dtype and device of a tensor that a trace stands for."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str

    @classmethod
    def of(cls, x: torch.Tensor) -> "Aval":
        return cls(tuple(x.shape), x.dtype, x.device.type)

    def fake(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


def avals(types: Sequence[Type], device: str) -> list[Aval]:
    """Whole values of some types; equal types have one object."""
    known = {t: Aval(t.shape, t.dtype, device) for t in dict.fromkeys(types)}
    return [known[t] for t in types]


@dataclasses.dataclass
class Unit:
    """One graph of a global program: a block, or the operators between two blocks.

    Its placeholders are tensors, its output is a list of nodes. `bounded` says that it gives finite values for finite
    ones of moderate size, whatever they are.
    """

    name: str
    graph: fx.Graph
    constants: dict[str, torch.Tensor]
    regions: list["Region"] = dataclasses.field(default_factory=list)
    #: For a block, whether it draws random numbers: its last input is then the key of the call, int64[2].
    draws: bool = False
    bounded: bool = False

    @property
    def inputs(self) -> list[fx.Node]:
        return [n for n in self.graph.nodes if n.op == "placeholder"]

    @property
    def outputs(self) -> list[fx.Node]:
        return list(self.graph.output_node().args[0])


class Call(NamedTuple):
    """One call of a unit, or one for each of several rows: numbers of the values it takes and makes, row by row."""

    unit: int
    args: tuple[int, ...]
    outs: tuple[int, ...]
    rows: int = 1

    def split(self) -> list["Call"]:
        """The calls of the single rows."""
        if self.rows == 1:
            return [self]
        a, o = len(self.args) // self.rows, len(self.outs) // self.rows
        return [
            Call(self.unit, self.args[r * a : (r + 1) * a], self.outs[r * o : (r + 1) * o]) for r in range(self.rows)
        ]


@dataclasses.dataclass
class GlobalProgram:
    """The model as traced: whole shapes, one device, no collectives; a list of calls of units over numbered values.

    The last of the inputs are keys, int64[2] each: `drawn` has the number of the call that draws by each.
    """

    units: list[Unit]
    calls: list[Call]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    out_tree: Any
    drawn: tuple[int, ...] = ()

    def manual_axes(self) -> set[str]:
        """The axes that per-rank code of the model splits values over."""
        regions = {id(r): r for unit in self.units for r in unit.regions}.values()
        return {a for r in regions for t in (*r.in_types, *r.out_types) for a in t.axes}

    def dim_names(self) -> set[str]:
        """All dim names that some `constrain` uses."""
        return {
            name
            for unit in self.units
            for n in unit.graph.nodes
            if n.target is torch.ops.fx_feather.constrain.default
            for name in n.args[1].split()
        }


@dataclasses.dataclass(frozen=True)
class Region:
    """Per-rank code in a global program: a function of local values, with the types of what it takes and gives."""

    name: str
    mesh: Mesh
    in_types: tuple[Type, ...]
    out_types: tuple[Type, ...]
    local: Callable[..., list[torch.Tensor]]


def merge_equal(graph: fx.Graph) -> None:
    """Makes one node of nodes that compute the same; a global program has no effects, and draws by key and number."""
    seen: dict[Any, fx.Node] = {}
    for n in list(graph.nodes):
        if n.op != "call_function" or "operands" in n.meta:
            continue
        try:
            key = (n.target, fx.node.map_aggregate(n.args, _freeze), tuple(sorted(n.kwargs.items())))
            first = seen.setdefault(_hashable(key), n)
        except TypeError:
            continue
        if first is not n:
            n.replace_all_uses_with(first)
            graph.erase_node(n)


def _freeze(x: Any) -> Any:
    return (type(x), x)


def _hashable(x: Any) -> Any:
    if isinstance(x, (list, tuple)):
        return tuple(_hashable(y) for y in x)
    hash(x)
    return x


def cut(
    whole: Unit,
    blocks: list[Unit],
    inputs: list[torch.Tensor],
    label: Callable[[int], str],
    out_tree: Any,
    drawn: tuple[int, ...] = (),
) -> GlobalProgram:
    """Cuts the outer graph at its block nodes: what lies between two blocks becomes a unit of its own.

    Args:
        whole: the outer graph; its block nodes name a block by its number, and have all operands in their meta.
        blocks: the blocks.
        inputs: the program's inputs; in the outer graph they stand as constants.
        label: what to call an input in messages, by its number.
        out_tree: structure of the results.
        drawn: the numbers of the calls that draw, whose keys are the last inputs.
    """
    units, calls = list(blocks), []
    of_input = {id(x): i for i, x in enumerate(inputs)}
    #: Numbers of values; nodes that stand for an input are made by no call.
    number: dict[Any, int] = {
        n: of_input[id(whole.constants[n.target])]
        for n in whole.graph.nodes
        if n.op == "get_attr" and id(whole.constants[n.target]) in of_input
    }
    for n, k in number.items():
        n.meta.setdefault("val", inputs[k])
        n.meta["label"] = label(k) if k < len(inputs) - len(drawn) else "the key"
    outside, count = frozenset(number), len(inputs)

    def new(key: Any) -> int:
        nonlocal count
        number[key] = count
        count += 1
        return number[key]

    order = {n: i for i, n in enumerate(whole.graph.nodes)}
    last_use = {a: order[n] for n in whole.graph.nodes for a in n.all_input_nodes}
    pending: list[fx.Node] = []

    def flush() -> None:
        nonlocal pending
        segment, pending = pending, []
        if not segment:
            return
        inside = set(segment)
        end = order[segment[-1]]
        read = dict.fromkeys(a for n in segment for a in n.all_input_nodes if a not in inside)
        constant = [a for a in read if a.op == "get_attr" and a not in outside]
        segment, args = [*constant, *segment], [a for a in read if a not in constant]
        outs = [n for n in segment if last_use.get(n, -1) > end and n.op != "get_attr"]
        graph, copied = fx.Graph(), {}
        for a in args:
            copied[a] = graph.placeholder(a.name)
            copied[a].meta = dict(a.meta)
        for n in segment:
            copied[n] = graph.node_copy(n, lambda x: copied[x])
        graph.output([copied[n] for n in outs])
        names = {n.target for n in segment if n.op == "get_attr"}
        units.append(Unit(whole.name, graph, {k: v for k, v in whole.constants.items() if k in names}, whole.regions))
        calls.append(Call(len(units) - 1, tuple(number[a] for a in args), tuple(new(n) for n in outs)))

    for n in whole.graph.nodes:
        if n in outside or n.op == "output":
            continue
        if "operands" in n.meta:
            # What lies before a block becomes a unit, whether this block needs it or a later one.
            flush()
            # Nodes may have been replaced since: those among the operands are the arguments as they are now.
            nodes = iter(n.args[0])
            operands = n.meta["operands"]
            args = tuple(of_input[id(x)] if isinstance(x, torch.Tensor) else number[next(nodes)] for x in operands)
            results = range(len(blocks[n.args[1]].outputs) * n.args[2])
            calls.append(Call(n.args[1], args, tuple(new((n, i)) for i in results), n.args[2]))
        elif n.target is operator.getitem and "operands" in n.args[0].meta:
            number[n] = number[n.args]
        else:
            pending.append(n)
    flush()
    outputs = tuple(number[n] for n in whole.outputs)
    return GlobalProgram(units, calls, tuple(range(len(inputs))), outputs, out_tree, drawn)
