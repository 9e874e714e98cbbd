"""Recording: runs a function on fake tensors and keeps its operators as an FX graph, far faster than make_fx."""

import contextlib
import dataclasses
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from .draws import Drawing, Site
from .errors import FeatherError, fail
from .source import stack_of_user, this_line
from .unit import Call, GlobalProgram, Unit

_written_at = ""


@contextlib.contextmanager
def written_at(line: str) -> Iterator[None]:
    """Operators recorded meanwhile are what the user's `line` became."""
    global _written_at
    before, _written_at = _written_at, line
    try:
        yield
    finally:
        _written_at = before


class Recorder(TorchDispatchMode):
    """Records each operator below autograd, so a vjp that is taken inside is part of the graph.

    `make_fx` does the same and more (symbolic shapes, module names, constants to fold), at about five times the cost
    an operator; local programs are large and need none of it.

    Args:
        lines: whether each operator keeps the user's line that it comes from, for messages.
    """

    def __init__(self, lines: bool = False) -> None:
        super().__init__()
        self.lines = lines
        self.graph = fx.Graph()
        self.constants: dict[str, torch.Tensor] = {}
        #: By identity; the tensors are kept, so that no other takes their place.
        self._nodes: dict[int, tuple[torch.Tensor, fx.Node]] = {}

    def placeholder(self, x: torch.Tensor) -> None:
        self.name(x, self.graph.placeholder(f"x{len(self._nodes)}"))

    def knows(self, x: torch.Tensor) -> bool:
        """Whether a tensor came in or was made here."""
        return id(x) in self._nodes

    def node(self, x: torch.Tensor) -> fx.Node:
        """The node of a tensor; one that came from outside is a constant."""
        known = self._nodes.get(id(x))
        if known is None:
            name = f"_constant{len(self.constants)}"
            self.constants[name] = x
            self.name(x, self.graph.create_node("get_attr", name))
            known = self._nodes[id(x)]
        return known[1]

    def name(self, x: torch.Tensor, n: fx.Node) -> None:
        """Takes a node as the one of a tensor."""
        n.meta["val"] = x
        self._nodes[id(x)] = (x, n)

    def _map(self, x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return self.node(x)
        if isinstance(x, (list, tuple)):
            return [self._map(y) for y in x]
        return x

    def emit(self, op: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        """Appends an operator whose results are known."""
        n = self.graph.call_function(
            op, tuple(self._map(a) for a in args), {k: self._map(v) for k, v in kwargs.items()}
        )
        if self.lines:
            n.meta["stack_trace"] = stack_of_user()
        if _written_at:
            n.meta["line"] = _written_at
        if isinstance(out, torch.Tensor):
            self.name(out, n)
            return
        n.meta["val"] = out
        for i, x in enumerate(out if isinstance(out, (list, tuple)) else []):
            if isinstance(x, torch.Tensor):
                # With a name at hand the graph needs not make one of the operator's.
                item = self.graph.create_node("call_function", operator.getitem, (n, i), name="getitem")
                self.name(x, item)

    def replay(self, *xs: torch.Tensor) -> list[torch.Tensor]:
        """Runs what was recorded, operator by operator."""
        env: dict[fx.Node, Any] = dict(zip(self.graph.find_nodes(op="placeholder"), xs, strict=True))
        for n in self.graph.nodes:
            if n.op == "get_attr":
                env[n] = self.constants[n.target]
            elif n.op == "call_function":
                args, kwargs = fx.node.map_arg((n.args, n.kwargs), env.__getitem__)
                with written_at(n.meta.get("line", "")):
                    env[n] = n.target(*args, **kwargs)
        return [env[n] for n in self.graph.output_node().args[0]]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.namespace != "prim":  # questions about a tensor's device or layout
            self.emit(func, args, kwargs, out)
        return out


def record(fn: Callable[..., Sequence[torch.Tensor]], fakes: Sequence[torch.Tensor], lines: bool = False) -> Recorder:
    """Records `fn(*fakes)`; the graph's output is the list of its results. Call it inside of a fake tensor mode."""
    recorder = Recorder(lines)
    for x in fakes:
        recorder.placeholder(x)
    with recorder:
        outs = fn(*fakes)
    recorder.graph.output([recorder.node(x) for x in outs])
    return recorder


def record_unit(flat: Callable[..., list[torch.Tensor]], fakes: list[torch.Tensor], name: str) -> Unit:
    """Records a block of simple operators. Where it draws, the key is its last input."""
    key = torch.empty(2, dtype=torch.int64, device=fakes[0].device if fakes else "cpu")
    site = Site(lambda: key)

    def drawing(*tensors: torch.Tensor) -> list[torch.Tensor]:
        with Drawing(site):
            return flat(*tensors[:-1])

    recorded = record(drawing, [*fakes, key], lines=True)
    recorded.graph.eliminate_dead_code()
    if not site.drawn:
        recorded.graph.erase_node(list(recorded.graph.find_nodes(op="placeholder"))[-1])
    return Unit(name, recorded.graph, recorded.constants, draws=site.drawn)


def place(graph: fx.Graph, device: str) -> None:
    """Lets operators of a graph recorded on the meta device make their tensors on a real one."""
    for n in graph.nodes:
        made = n.kwargs.get("device")
        if isinstance(made, torch.device) and made.type == "meta":
            n.update_kwarg("device", torch.device(device))


@dataclasses.dataclass
class _Segment:
    """Operators between two calls: a graph whose placeholders are values of the whole program."""

    recorder: Recorder = dataclasses.field(default_factory=lambda: Recorder(lines=True))
    args: list[int] = dataclasses.field(default_factory=list)
    outs: dict[int, fx.Node] = dataclasses.field(default_factory=dict)


class CallRecorder(TorchDispatchMode):
    """Records a whole program at once as calls of units: blocks hand their calls in, other operators form segments.

    An optimizer has thousands of values, and all but a few are only passed from call to call: as numbers they cost a
    small part of what nodes of a graph do.
    """

    def __init__(self) -> None:
        super().__init__()
        self.items: list[_Segment | Call] = []
        #: By identity: the tensor, kept alive, with its number or the segment that makes it.
        self._known: dict[int, tuple[torch.Tensor, int | _Segment]] = {}
        self._made: dict[Any, list[torch.Tensor]] = {}
        self._count = 0

    def value(self, x: torch.Tensor) -> int:
        """Gives a tensor that no segment makes its number."""
        self._known[id(x)] = (x, self._count)
        self._count += 1
        return self._count - 1

    def number(self, x: torch.Tensor) -> int:
        """The number of a value; a value of a segment becomes one of its results."""
        if id(x) not in self._known:
            segment = self._segment()  # a constant
            segment.recorder.node(x)
            self._known[id(x)] = (x, segment)
        at = self._known[id(x)][1]
        if isinstance(at, _Segment):
            number = self.value(x)
            at.outs[number] = at.recorder.node(x)
            return number
        return at

    def call(
        self, unit: int, tensors: Sequence[torch.Tensor], rows: int, make: Callable[[], list[torch.Tensor]]
    ) -> list[torch.Tensor]:
        """Appends a call of a block, and gives its results; an equal call before has the same."""
        known = self._known
        args = tuple([k[1] if (k := known.get(id(x))) and type(k[1]) is int else self.number(x) for x in tensors])
        if (unit, args) not in self._made:
            outs = self._made[unit, args] = make()
            self.items.append(Call(unit, args, tuple(self.value(x) for x in outs), rows))
        return self._made[unit, args]

    def _segment(self) -> _Segment:
        if not self.items or not isinstance(self.items[-1], _Segment):
            self.items.append(_Segment())
        segment = self.items[-1]
        assert isinstance(segment, _Segment)
        return segment

    def _operands(self, segment: _Segment, x: Any) -> None:
        if isinstance(x, torch.Tensor):
            known = self._known.get(id(x))
            if known is not None and known[1] is not segment and not segment.recorder.knows(x):
                segment.args.append(self.number(x))
                segment.recorder.placeholder(x)
        elif isinstance(x, (list, tuple)):
            for y in x:
                self._operands(segment, y)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            out = func(*args, **kwargs)
        except RuntimeError as e:
            if "expected device meta" not in str(e):
                raise
            fail(
                FeatherError,
                call=f"{func} at {this_line()}",
                got="a tensor from outside in a function of many leaves, such as an update",
                number="1 tensor is closed over",
                rule="an update is traced without values: what it reads is a number, its state or an argument",
                fix="keep the tensor in the optimizer's state, as init(params) gives it, or make it inside",
            )
        if func.namespace == "prim":
            return out
        segment = self._segment()
        self._operands(segment, [*args, *kwargs.values()])
        segment.recorder.emit(func, args, kwargs, out)
        for x in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(x, torch.Tensor):
                self._known[id(x)] = (x, segment)
        return out

    def program(
        self,
        name: str,
        blocks: list[Unit],
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        out_tree: Any,
        drawn: tuple[int, ...] = (),
    ) -> GlobalProgram:
        """What was recorded; segments are units named `name`."""
        units, calls = list(blocks), []
        for item in self.items:
            if isinstance(item, Call):
                calls.append(item)
            elif item.outs:
                graph = item.recorder.graph
                graph.output(list(item.outs.values()))
                graph.eliminate_dead_code()
                units.append(Unit(name, graph, item.recorder.constants))
                calls.append(Call(len(units) - 1, tuple(item.args), tuple(item.outs)))
        return GlobalProgram(units, calls, inputs, outputs, out_tree, drawn)
