"""Tracing: from a pure function to a global program, in which each distinct block is a graph of its own."""

import contextlib
import dataclasses
import functools as ft
import operator
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import _disable_current_modes

from . import tree
from .errors import FeatherError, ShapeError, SpecError, fail

_library = torch.library.Library("fx_feather", "FRAGMENT")
_library.define("constrain(Tensor x, str dims) -> Tensor")
_library.define("block(Tensor[] args, int id) -> Tensor[]")
# A constraint copies, since an alias would be hidden from the trace. The partitioner removes the copy.
_library.impl("constrain", lambda x, dims: x.clone(), "CompositeExplicitAutograd")
torch.library.register_fake("fx_feather::constrain", lambda x, dims: torch.empty_like(x), lib=_library)


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


@dataclasses.dataclass
class Unit:
    """One graph of a global program: a block, or the operators between two blocks.

    Its placeholders are tensors, its output is a list of nodes.
    """

    name: str
    graph: fx.Graph
    constants: dict[str, torch.Tensor]

    @property
    def inputs(self) -> list[fx.Node]:
        return [n for n in self.graph.nodes if n.op == "placeholder"]

    @property
    def outputs(self) -> list[fx.Node]:
        return list(self.graph.output_node().args[0])  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a unit: numbers of the values it takes and makes."""

    unit: int
    args: tuple[int, ...]
    outs: tuple[int, ...]


@dataclasses.dataclass
class GlobalProgram:
    """The model as traced: whole shapes, one device, no collectives; a list of calls of units over numbered values."""

    units: list[Unit]
    calls: list[Call]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    out_tree: Any
    avals: dict[int, Aval]

    def dim_names(self) -> set[str]:
        """All dim names that some `constrain` uses."""
        return {
            name
            for unit in self.units
            for n in unit.graph.nodes
            if n.target is torch.ops.fx_feather.constrain.default
            for name in n.args[1].split()
        }


@dataclasses.dataclass
class _Trace:
    """What is known while a function is traced: its blocks so far."""

    mode: FakeTensorMode
    blocks: list[Unit] = dataclasses.field(default_factory=list)
    outs: list[tuple[list[Aval], Any]] = dataclasses.field(default_factory=list)
    ids: dict[Any, int] = dataclasses.field(default_factory=dict)
    inside: bool = False
    #: Keeps alive what the keys of `ids` name by identity, so that no new object takes its place.
    kept: list[Any] = dataclasses.field(default_factory=list)


_current: _Trace | None = None


def _block_outputs(args: list[torch.Tensor], id: int) -> list[torch.Tensor]:
    assert _current is not None, "a block node exists inside of a trace only"
    return [a.fake() for a in _current.outs[id][0]]


_library.impl("block", _block_outputs, "CompositeExplicitAutograd")
torch.library.register_fake("fx_feather::block", _block_outputs, lib=_library)


def tracing() -> bool:
    """Whether a function is being traced right now."""
    return _current is not None


def constrain(x: torch.Tensor, dims: str) -> torch.Tensor:
    """Names the dims of a value, where a layout should act on them.

    On one device this is the identity. In a partitioned program the value has from here on the split that the layout
    gives to these names; a pending sum is resolved. `_` names a dim that no layout splits.

    Args:
        x: any tensor.
        dims: one name for each dim of `x`, separated by blanks, such as `"batch seq embed"`.

    Raises:
        SpecError: another number of names than dims, or a name used twice.

    >>> constrain(torch.ones(2, 3), "batch embed").shape
    torch.Size([2, 3])
    """
    names = dims.split()
    twice = [n for n in names if n != "_" and names.count(n) > 1]
    if len(names) != x.ndim or twice:
        fail(
            SpecError,
            call=f"constrain(x, {dims!r})",
            got=f"x of shape {list(x.shape)}",
            number=f"{twice[0]!r} is named twice" if twice else f"{len(names)} names for {x.ndim} dims",
            rule="each dim has one name of its own, so that a layout can say how it is split",
            fix=f'constrain(x, "{" ".join((names + ["_"] * x.ndim)[: x.ndim])}")'
            if not twice
            else f"write _ for one of the two {twice[0]!r}",
        )
    return torch.ops.fx_feather.constrain(x, dims) if tracing() else x


def _identity(fn: Any, kept: list[Any]) -> Any:
    """A key that is equal for functions that do the same: by code and by what they close over."""
    if isinstance(fn, ft.partial):
        parts = [fn.func, *fn.args, *(v for _, v in sorted(fn.keywords.items()))]
        return ("partial", tuple(sorted(fn.keywords)), *(_identity(p, kept) for p in parts))
    if isinstance(fn, types.FunctionType):
        cells = tuple(_identity(c.cell_contents, kept) for c in fn.__closure__ or ())
        return ("function", fn.__code__, cells, tuple(_identity(d, kept) for d in fn.__defaults__ or ()))
    try:
        hash(fn)
    except TypeError:
        kept.append(fn)
        return ("id", id(fn))
    # 1, 1.0 and True are equal, yet they trace differently.
    return (type(fn), fn)


def block(fn: Callable[..., Any], name: str | None = None) -> Callable[..., Any]:
    """Marks a function that a model calls repeatedly, such as one layer.

    Outside of a trace the result simply calls `fn`. In a compiled program a block is one unit for four things: it is
    traced and partitioned once for all calls alike, its parameters travel in one communication bucket, it is a unit of
    rematerialisation, and a place where a pipeline may be cut.

    Args:
        fn: a pure function of pytrees; its tensors all come in as arguments, and it returns a pytree of tensors.
            Leaves that are not tensors are static.
        name: shown in programs and messages; the function's own name otherwise.

    >>> block(torch.nn.functional.silu)(torch.zeros(2))
    tensor([0., 0.])
    """
    inner = fn
    while isinstance(inner, ft.partial):
        inner = inner.func
    label = name or getattr(inner, "__name__", type(inner).__name__)

    @ft.wraps(fn, assigned=("__doc__",), updated=())
    def call(*args: Any) -> Any:
        # A block in a block is part of it: the outer one is the unit.
        if _current is None or _current.inside:
            return fn(*args)
        leaves, treedef = tree.flatten(args)
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        static = tuple(None if isinstance(x, torch.Tensor) else _identity(x, _current.kept) for x in leaves)
        key = (label, _identity(fn, _current.kept), treedef, static, tuple(Aval.of(x) for x in tensors))
        if key not in _current.ids:
            _current.ids[key] = _trace_block(_current, fn, label, leaves, treedef)
        id = _current.ids[key]
        out = torch.ops.fx_feather.block(tensors, id)
        return tree.unflatten(_current.outs[id][1], out)

    call.__name__ = label
    return call


def _trace_block(trace: _Trace, fn: Callable[..., Any], label: str, leaves: list[Any], treedef: Any) -> int:
    at = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
    avals = [Aval.of(leaves[i]) for i in at]
    out_tree = None

    def flat(*tensors: torch.Tensor) -> list[torch.Tensor]:
        nonlocal out_tree
        full = list(leaves)
        for i, x in zip(at, tensors, strict=True):
            full[i] = x
        outs, out_tree = tree.flatten(fn(*tree.unflatten(treedef, full)))
        _check_outputs(outs, f"block {label!r}")
        # An input that is returned as it is, or a value returned twice, would be one node with two owners.
        return [torch.ops.aten.alias(x) for x in outs]

    trace.inside = True
    try:
        # The block is traced by itself: none of the modes of the outer trace may see its operators.
        with _disable_current_modes(), trace.mode:
            unit = _trace_unit(flat, [a.fake() for a in avals], label)
    finally:
        trace.inside = False
    trace.blocks.append(unit)
    trace.outs.append(([Aval.of(n.meta["val"]) for n in unit.outputs], out_tree))
    return len(trace.blocks) - 1


def _check_outputs(outs: list[Any], what: str) -> None:
    for x in outs:
        if not isinstance(x, torch.Tensor):
            fail(
                ShapeError,
                call=what,
                got=f"an output of type {type(x).__name__}",
                number=f"{x!r} is not a tensor",
                rule="a traced function returns a pytree of tensors: a Python number would be frozen at trace time",
                fix="torch.as_tensor(...), or leave it out of the result",
            )


def trace_unit(flat: Callable[..., list[torch.Tensor]], avals: list[Aval], label: str) -> Unit:
    """Traces a function of tensors, outside of any other trace, to one unit; blocks in it are part of it."""
    with _disable_current_modes(), FakeTensorMode():
        return _trace_unit(flat, [a.fake() for a in avals], label)


def _trace_unit(flat: Callable[..., list[torch.Tensor]], fakes: list[torch.Tensor], label: str) -> Unit:
    gm = make_fx(flat, pre_dispatch=True, record_stack_traces=True, _allow_non_fake_inputs=True)(*fakes)
    gm.graph.eliminate_dead_code()
    constants: dict[str, torch.Tensor] = {}
    for n in gm.graph.nodes:
        if n.op == "get_attr":
            value = getattr(gm, n.target)
            if getattr(value, "fake_mode", None) is not None:
                fail(
                    FeatherError,
                    call=f"{label}(...)",
                    got=f"a tensor of shape {list(value.shape)} from outside, used at\n{user_line(n)}",
                    number="1 tensor is closed over",
                    rule="whatever a block reads is an argument: hidden tensors have no dims that a layout could split",
                    fix="pass the tensor to the block as an argument",
                )
            constants[n.target] = value
    return Unit(label, gm.graph, constants)


@contextlib.contextmanager
def _tracing(trace: _Trace) -> Iterator[None]:
    global _current
    before, _current = _current, trace
    try:
        yield
    finally:
        _current = before


def trace(fn: Callable[..., Any], args: Any, name: str = "main") -> GlobalProgram:
    """Traces `fn(*args)` to a global program.

    Args:
        fn: a pure function of pytrees of tensors.
        args: a tuple of pytrees whose leaves are tensors or `Aval`s; only their shapes and dtypes matter.
        name: shown for the operators outside of blocks.
    """
    leaves, treedef = tree.flatten(args)
    avals = [x if isinstance(x, Aval) else Aval.of(x) for x in leaves]
    out_tree = None

    def flat(*tensors: torch.Tensor) -> list[torch.Tensor]:
        nonlocal out_tree
        outs, out_tree = tree.flatten(fn(*tree.unflatten(treedef, list(tensors))))
        _check_outputs(outs, f"{name}(...)")
        return outs

    state = _Trace(FakeTensorMode())
    with _tracing(state), state.mode:
        whole = _trace_unit(flat, [a.fake() for a in avals], name)
        _merge_equal(whole.graph)
        return _cut(whole, state, out_tree)


def _merge_equal(graph: fx.Graph) -> None:
    """Makes one node of nodes that compute the same; a global program has no effects and no random numbers."""
    seen: dict[Any, fx.Node] = {}
    for n in list(graph.nodes):
        if n.op != "call_function":
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


def _cut(whole: Unit, state: _Trace, out_tree: Any) -> GlobalProgram:
    """Cuts the outer graph at its blocks: what lies between two blocks becomes a unit of its own."""
    block_op = torch.ops.fx_feather.block.default
    units, calls = list(state.blocks), []
    number: dict[Any, int] = {}
    avals: dict[int, Aval] = {}

    def new(n: fx.Node) -> int:
        number[n] = len(number)
        avals[number[n]] = Aval.of(n.meta["val"])
        return number[n]

    inputs = tuple(new(n) for n in whole.inputs)
    last_use: dict[fx.Node, int] = {}
    order = {n: i for i, n in enumerate(whole.graph.nodes)}
    for n in whole.graph.nodes:
        for a in n.all_input_nodes:
            last_use[a] = order[n]
    pending: list[fx.Node] = []

    def flush() -> None:
        nonlocal pending
        segment, pending = pending, []
        if not segment:
            return
        inside = set(segment)
        end = order[segment[-1]]
        args = list(dict.fromkeys(a for n in segment for a in n.all_input_nodes if a not in inside))
        outs = [n for n in segment if last_use.get(n, -1) > end and n.op != "get_attr"]
        graph, copied = fx.Graph(), {}
        for a in args:
            copied[a] = graph.placeholder(a.name)
            copied[a].meta = dict(a.meta)
        for n in segment:
            copied[n] = graph.node_copy(n, lambda x: copied[x])
        graph.output([copied[n] for n in outs])
        names = {n.target for n in segment if n.op == "get_attr"}
        units.append(Unit(whole.name, graph, {k: v for k, v in whole.constants.items() if k in names}))
        calls.append(Call(len(units) - 1, tuple(number[a] for a in args), tuple(new(n) for n in outs)))

    produced_by_block: dict[fx.Node, int] = {}
    for n in whole.graph.nodes:
        if n.op in ("placeholder", "output"):
            continue
        if n.target is block_op:
            # Operators that no later block needs yet may wait: fewer, larger units. Those it needs must come first.
            flush()
            id = n.args[1]
            count = len(state.outs[id][0])
            base = len(number)
            for i in range(count):
                number[n, i] = base + i
                avals[base + i] = state.outs[id][0][i]
            args = tuple(number[a] for a in n.args[0])
            calls.append(Call(id, args, tuple(range(base, base + count))))
            produced_by_block[n] = base
        elif n.op == "call_function" and n.args and n.args[0] in produced_by_block and n.target is operator.getitem:
            number[n] = produced_by_block[n.args[0]] + n.args[1]
        else:
            pending.append(n)
    flush()
    outputs = []
    for n in whole.outputs:
        outputs.append(number[n])
    return GlobalProgram(units, calls, inputs, tuple(outputs), out_tree, avals)


def user_line(node: fx.Node) -> str:
    """The line of the user's own source that made a node, as `file:line: code`."""
    frames = [f for f in (node.meta.get("stack_trace") or "").split("  File ") if f.strip()]
    own = [f for f in frames if "/torch/" not in f and "fx_feather/trace.py" not in f and "/optree/" not in f]
    if not own:
        return "(source line not known)"
    head, *rest = own[-1].strip().splitlines()
    parts = head.split(", ")
    return f"{parts[0].strip(chr(34))}:{parts[1].removeprefix('line ')}: {rest[0].strip() if rest else ''}"
