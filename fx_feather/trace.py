"""Tracing: from a pure function to a global program, in which each distinct block is a graph of its own."""

import contextlib
import dataclasses
import functools as ft
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils._python_dispatch import _disable_current_modes

from . import tree
from .constants import Frozen, freeze
from .custom import emit, operands_of, results_of
from .draws import Drawing, Key, Site, lower_graph, no_plain_run, plain_call
from .functional import without_writes
from .identity import identity
from .pure import check_outputs, check_recorded, lowered, transforming, transforms, watched
from .record import CallRecorder, place, record_unit
from .source import label, labels
from .spec import check_names
from .unit import Aval, GlobalProgram, Region, Unit, cut, merge_equal

_library = torch.library.Library("fx_feather", "FRAGMENT")
_library.define("constrain(Tensor x, str dims) -> Tensor")
_library.define("block(Tensor[] args, int id, int rows) -> Tensor[]")
_library.define("custom(Tensor[] args) -> Tensor[]")
_library.define("region(Tensor[] args, int id) -> Tensor[]")
# A constraint copies, since an alias would be hidden from the trace. The partitioner removes the copy.
_library.impl("constrain", lambda x, dims: x.clone(), "CompositeExplicitAutograd")
torch.library.register_fake("fx_feather::constrain", lambda x, dims: torch.empty_like(x), lib=_library)


@dataclasses.dataclass
class _Trace:
    """What is known while a function is traced: its blocks so far."""

    #: Of the outer trace; none where every tensor is on the meta device.
    mode: FakeTensorMode | None
    calls: CallRecorder | None = None
    blocks: list[Unit] = dataclasses.field(default_factory=list)
    outs: list[tuple[list[Aval], Any]] = dataclasses.field(default_factory=list)
    ids: dict[Any, int] = dataclasses.field(default_factory=dict)
    regions: list[Region] = dataclasses.field(default_factory=list)
    inside: bool = False
    device: str = "cpu"
    #: Keeps alive what the keys of `ids` name by identity, so that no new object takes its place.
    kept: list[Any] = dataclasses.field(default_factory=list)
    frozen: Frozen = dataclasses.field(default_factory=dict)
    #: What stands for the keys of calls that draw, by the number of the call: inputs of the program.
    keys: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)

    def new_key(self, call: int | None = None) -> torch.Tensor:
        """The key of the next call of a block that draws, or that of call 0, which is all that is outside."""
        key = self.fakes([Aval((2,), torch.int64, self.device)])[0]
        self.keys[1 + len(self.keys.keys() - {0}) if call is None else call] = key
        if self.calls is not None:
            self.calls.value(key)
        return key

    def fakes(self, avals: Sequence[Aval]) -> list[torch.Tensor]:
        """Tensors without memory, which are many: a copy of one costs a tenth of a new one, or of a mode's."""
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            distinct = {id(a): a for a in avals}
            first = {k: torch.empty(a.shape, dtype=a.dtype, device="meta") for k, a in distinct.items()}
            metas = [first[id(a)].detach() for a in avals]
            if self.mode is None:
                return metas
            return [FakeTensor(self.mode, m, torch.device(a.device)) for m, a in zip(metas, avals, strict=True)]


_current: _Trace | None = None


@contextlib.contextmanager
def _inside(trace: _Trace) -> Iterator[None]:
    """Within, a block is part of what calls it."""
    before, trace.inside = trace.inside, True
    try:
        yield
    finally:
        trace.inside = before


def _block_outputs(args: list[torch.Tensor], id: int, rows: int) -> list[torch.Tensor]:
    assert _current is not None, "a block node exists inside of a trace only"
    return _current.fakes(_current.outs[id][0] * rows)


def _region_outputs(args: list[torch.Tensor], id: int) -> list[torch.Tensor]:
    assert _current is not None, "a region node exists inside of a trace only"
    return [torch.empty(t.shape, dtype=t.dtype, device=args[0].device) for t in _current.regions[id].out_types]


_library.impl("block", _block_outputs, "CompositeExplicitAutograd")
_library.impl("region", _region_outputs, "CompositeExplicitAutograd")
torch.library.register_fake("fx_feather::block", _block_outputs, lib=_library)
torch.library.register_fake("fx_feather::region", _region_outputs, lib=_library)


def emit_region(region: Region, args: list[torch.Tensor]) -> list[torch.Tensor]:
    """Puts per-rank code into the program that is being traced; gives its whole results."""
    assert _current is not None, "a region node exists inside of a trace only"
    _current.regions.append(region)
    return torch.ops.fx_feather.region(args, len(_current.regions) - 1)


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
    check_names(x, dims)
    return torch.ops.fx_feather.constrain(x, dims) if tracing() and not transforming() else x


class Block:
    """A function marked by `block`."""

    def __init__(self, fn: Callable[..., Any], name: str | None):
        inner = fn
        while isinstance(inner, ft.partial):
            inner = inner.func
        self.fn = fn
        self.name = self.__name__ = str(name or getattr(inner, "__name__", type(inner).__name__))
        self.__doc__, self.bounded = inner.__doc__, getattr(inner, "bounded", False)

    def __call__(self, *args: Any) -> Any:
        """The function itself; in a trace, a node that stands for it."""
        return self.each([args])[0]

    def each(self, rows: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The results for many argument tuples, such as one for each leaf of a tree.

        Rows that are alike become one node together, so a program stays small however many leaves there are.

        >>> block(torch.add).each([(1, torch.tensor(1)), (2, torch.tensor(2))])
        [tensor(2), tensor(4)]
        """
        # A block in a block is part of it, as is one in a transform of torch.func, which hides its values from here.
        if _current is None or _current.inside or transforming():
            return [plain_call(self.fn, row) for row in rows]
        alike: dict[Any, list[_Row]] = {}
        flat, table = tree.flatten(list(rows))
        with torch._C.DisableTorchFunction():  # a question about a shape is no operator
            kept = _current.kept
            # Rows share what is no leaf of a tree, such as the rate of a step.
            kind = {
                k: (x.shape, x.dtype) if isinstance(x, torch.Tensor) else identity(x, kept)
                for k, x in {id(x): x for x in flat}.items()
            }
            kinds = [kind[id(x)] for x in flat]
        start = 0
        for at, treedef in enumerate(table.children()):
            end = start + treedef.num_leaves
            alike.setdefault((treedef, *kinds[start:end]), []).append(_Row(at, flat[start:end], treedef))
            start = end
        # Under torch.no_grad a block is another one.
        function = (self.name, identity(self.fn, _current.kept), torch.is_grad_enabled())
        results: list[Any] = [None] * len(rows)
        for key, (first, *_) in alike.items():
            if (function, key) not in _current.ids:
                _current.ids[function, key] = _trace_block(_current, self.fn, self.name, first.leaves, first.treedef)
                _current.blocks[-1].bounded = self.bounded
        drawing = {m.at for k, ms in alike.items() if _current.blocks[_current.ids[function, k]].draws for m in ms}
        keys = {at: [_current.new_key()] for at in sorted(drawing)}
        for key, members in alike.items():
            unit = _current.ids[function, key]
            avals, out_tree = _current.outs[unit]
            # Models have few calls, and a row each: their graph is cut between them.
            for part in [members] if _current.calls is not None else [[m] for m in members]:
                operands = [x for m in part for x in (*m.leaves, *keys.get(m.at, ()))]
                tensors = [x for x in operands if isinstance(x, torch.Tensor)]
                outs = _emit_block(tensors, unit, len(part))
                alone = len(avals) == 1 and out_tree.is_leaf()
                for k, m in enumerate(part):
                    results[m.at] = (
                        outs[k] if alone else tree.unflatten(out_tree, outs[k * len(avals) : (k + 1) * len(avals)])
                    )
        return results


class _Row(NamedTuple):
    """One of many argument tuples: its number, leaves and structure."""

    at: int
    leaves: list[Any]
    treedef: Any


def _emit_block(tensors: list[torch.Tensor], id: int, rows: int) -> list[torch.Tensor]:
    if _current is not None and _current.calls is not None:
        return _current.calls.call(id, tensors, rows, lambda: _block_outputs(tensors, id, rows))
    # The nodes are made by hand: parameters that come straight from outside need none, and the dispatcher has no say.
    operands = operands_of(tensors)
    nodes = [x for x in operands if isinstance(x, fx.Node)]
    node = get_proxy_mode().tracer.graph.call_function(torch.ops.fx_feather.block.default, (nodes, id, rows))
    node.meta["operands"] = operands
    return results_of(node, _block_outputs(tensors, id, rows))


def _function(cls: type, args: Sequence[Any]) -> Any:
    """A call of a `torch.autograd.Function` in a trace; a block in it is part of it."""
    with _inside(_current or _Trace(None)):
        return emit(cls, args, trace_unit)


def block(fn: Callable[..., Any], name: str | None = None) -> Block:
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
    return Block(fn, name)


def _trace_block(trace: _Trace, fn: Callable[..., Any], what: str, leaves: list[Any], treedef: Any) -> int:
    at = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
    avals = [Aval.of(leaves[i]) for i in at]
    out_tree = None

    def flat(*tensors: torch.Tensor) -> list[torch.Tensor]:
        nonlocal out_tree
        full = list(leaves)
        for i, x in zip(at, tensors, strict=True):
            full[i] = x
        outs, out_tree = tree.flatten(fn(*tree.unflatten(treedef, full)))
        check_outputs(outs, f"block {what!r}")
        # An input that is returned as it is, or a value returned twice, would be one node with two owners.
        with torch.enable_grad():
            return [torch.ops.aten.alias(x) for x in outs]

    # The block is traced by itself: none of the modes of the outer trace may see its operators.
    with _inside(trace), _disable_current_modes(), trace.mode or contextlib.nullcontext():
        label_of = labels(fn, treedef)
        unit = _trace_unit(flat, avals, what, trace.calls is not None, lambda i: label_of(at[i]))
    trace.blocks.append(unit)
    trace.outs.append(([Aval.of(n.meta["val"]) for n in unit.outputs], out_tree))
    return len(trace.blocks) - 1


def trace_unit(flat: Callable[..., list[torch.Tensor]], avals: list[Aval], what: str, operators: bool = False) -> Unit:
    """Traces a function of tensors, outside of any other trace, to one unit; blocks in it are part of it.

    With `operators`, to the simple operators that composite ones are made of.
    """
    with _disable_current_modes(), FakeTensorMode(allow_non_fake_inputs=True):
        return _trace_unit(flat, avals, what, operators)


def _trace_unit(
    flat: Callable[..., list[torch.Tensor]],
    avals: list[Aval],
    what: str,
    operators: bool = False,
    name: Callable[[int], str] = "operand {}".format,
) -> Unit:
    fakes = [a.fake() for a in avals]
    if operators:
        unit = record_unit(flat, fakes, what)
    else:
        unit = lowered(lambda simple: _trace_graph(flat, fakes, what, simple=simple))
    for i, n in enumerate(unit.inputs[: len(fakes)]):
        n.meta["label"] = name(i)
    unit = without_writes(unit, label)
    freeze(unit, _current.frozen if _current else {}, what=f"{what}(...)")
    return unit


def _trace_graph(
    flat: Callable[..., list[torch.Tensor]],
    fakes: list[torch.Tensor],
    what: str,
    key: Key = lambda: None,
    simple: bool = False,
) -> Unit:
    """Traces to one graph. Where it draws, the key is its last input, or what `key` gives, as a constant."""
    if simple:
        # Below autograd, where a transform has become the operators that it stands for; composite ones have as well.
        with transforms(f"{what}(...)"):
            gm = make_fx(watched(flat, f"{what}(...)", _function, region=True), _allow_non_fake_inputs=True)(*fakes)
    else:
        gm = make_fx(watched(flat, f"{what}(...)", _function), pre_dispatch=True, _allow_non_fake_inputs=True)(*fakes)
    check_recorded(gm.graph, f"{what}(...)")

    draws = lower_graph(gm, key)
    gm.graph.eliminate_dead_code()
    constants = {n.target: getattr(gm, n.target) for n in gm.graph.nodes if n.op == "get_attr"}
    return Unit(what, gm.graph, constants, _current.regions if _current else [], draws)


@contextlib.contextmanager
def _tracing(trace: _Trace) -> Iterator[None]:
    global _current
    before, _current = _current, trace
    try:
        yield
    finally:
        _current = before


@no_plain_run()
def trace(fn: Callable[..., Any], args: Any, name: str = "main", operators: bool = False) -> GlobalProgram:
    """Traces `fn(*args)` to a global program.

    Args:
        fn: a pure function of pytrees of tensors.
        args: a tuple of pytrees whose leaves are tensors or `Aval`s; only their shapes and dtypes matter.
        name: shown for the operators outside of blocks.
        operators: keep the simple operators that composite ones are made of, at a fraction of the cost of a call. A
            model is traced by its composite operators (linear, attention), whose rules say more.
    """
    leaves, treedef = tree.flatten(args)
    avals = [x if isinstance(x, Aval) else Aval.of(x) for x in leaves]
    out_tree = None

    def flat(*tensors: torch.Tensor) -> list[torch.Tensor]:
        nonlocal out_tree
        outs, out_tree = tree.flatten(fn(*tree.unflatten(treedef, list(tensors))))
        check_outputs(outs, f"{name}(...)")
        return outs

    if operators:
        return _trace_calls(flat, avals, name, lambda: out_tree)
    return lowered(lambda simple: _trace_model(fn, flat, treedef, avals, name, lambda: out_tree, simple))


def _trace_model(
    fn: Callable[..., Any],
    flat: Callable[..., list[torch.Tensor]],
    treedef: Any,
    avals: list[Aval],
    name: str,
    out_tree: Callable[[], Any],
    simple: bool,
) -> GlobalProgram:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    state = _Trace(mode, device=avals[0].device if avals else "cpu")
    # As torch.func does: where a gradient is wanted is for the function itself to say, not for who calls it.
    with _tracing(state), mode, torch.enable_grad():
        # The inputs are closed over: most are parameters that only blocks use, and need no node in the outer graph.
        fakes = state.fakes(avals)
        whole = _trace_graph(lambda: flat(*fakes), [], name, lambda: state.new_key(0), simple)
    inputs, label_of = [*fakes, *state.keys.values()], labels(fn, treedef)
    given = {id(x): i for i, x in enumerate(inputs)}
    for n in whole.graph.find_nodes(op="get_attr"):
        i = given.get(id(whole.constants[n.target]))
        n.meta["label"] = label_of(i) if i is not None and i < len(fakes) else "a tensor"
    whole = without_writes(whole, label)
    freeze(whole, state.frozen, frozenset(given), f"{name}(...)")
    merge_equal(whole.graph)
    return cut(whole, state.blocks, inputs, label_of, out_tree(), tuple(state.keys))


def _trace_calls(
    flat: Callable[..., list[torch.Tensor]], avals: list[Aval], name: str, out_tree: Callable[[], Any]
) -> GlobalProgram:
    # On the meta device an operator costs least, and no composite one has to choose its kernels.
    device = avals[0].device if avals else "cpu"
    recorder = CallRecorder()
    state = _Trace(None, recorder, device="meta")
    tensors = state.fakes(avals)
    inputs = [recorder.value(x) for x in tensors]
    site = Site(lambda: state.new_key(0))
    with _tracing(state), recorder, Drawing(site):
        outs = flat(*tensors)
    outputs = tuple(recorder.number(x) for x in outs)
    drawn = {call: recorder.number(x) for call, x in state.keys.items()}
    program = recorder.program(name, state.blocks, (*inputs, *drawn.values()), outputs, out_tree(), tuple(drawn))
    for unit in program.units:
        place(unit.graph, device)
    return program
