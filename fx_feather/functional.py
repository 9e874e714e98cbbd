"""Functional graphs: what a function writes over memory of its own becomes values, through all views of it."""

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, fx
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from .errors import FeatherError, fail, message, raise_all
from .memory import storage, writes
from .pure import NO_GRAD, takes_gradient
from .record import Recorder
from .source import user_line
from .unit import Unit

_DETACH = (torch.ops.aten.detach.default, torch.ops.aten.detach_.default)


def written(n: fx.Node) -> set[int]:
    """The memory that an operator of a traced function writes over. What detaches in place changes no number."""
    return set() if n.target in _DETACH else {s for s in writes(n) if s is not None}


def without_writes(unit: Unit, called: Callable[[fx.Node], str]) -> Unit:
    """The unit with a value of its own for each write; what is never written over is kept as it was traced.

    Args:
        unit: as traced. Its placeholders and constants come from outside.
        called: what to call one of these in messages.

    Raises:
        FeatherError: a write to what comes from outside, to a value that is detached and used undetached too, or one
            that has no functional form.
    """
    over = set().union(*map(written, unit.graph.nodes))
    if not over:
        return unit
    refuse_outside(unit.graph, unit.constants, called)
    return _Functional(unit, over).run()


def refuse_outside(graph: fx.Graph, constants: dict[str, Any], called: Callable[[fx.Node], str]) -> None:
    """Raises FeatherError if something is written to that comes from outside: an argument, or a tensor closed over."""
    outside: dict[int | None, fx.Node] = {storage(n): n for n in graph.nodes if n.op == "placeholder"}
    for n in graph.find_nodes(op="get_attr"):
        outside |= {storage(n): n, constants[n.target].untyped_storage()._cdata: n}
    raise_all(
        FeatherError,
        [
            message(
                call=f"{_name(n)} at {user_line(n)}",
                got=f"a write to {called(outside[s])}, which comes from outside",
                number=f"{_name(n)} changes its operand in place",
                rule="a traced function is pure: it may write to what it made itself, and to nothing else",
                fix=f"x = x.clone() before it, or the operator without the trailing underscore "
                f"({n.target._schema.name.rpartition('::')[2].rstrip('_')})",
            )
            for n in graph.nodes
            for s in sorted(written(n) & (outside.keys() - {None}))
        ],
    )


def check_region(graph: fx.Graph, constants: dict[str, Any]) -> None:
    """Raises FeatherError for writes in per-rank code that are not to what it made, or behind a gradient's back."""
    refuse_outside(graph, constants, lambda n: f"argument {n.name}" if n.op == "placeholder" else "a tensor")
    for n in graph.nodes:
        if n.meta.get(NO_GRAD) and written(n) and takes_gradient(n.args[0].meta["val"]):
            _refuse(
                n,
                "a write where no gradient is wanted, in per-rank code",
                "1 gradient would be that of other numbers than these",
                "y = f(x) in the place of the write, under torch.no_grad; or the write outside of it",
            )


def _name(n: fx.Node) -> str:
    return str(n.target.name())


class _Recorder(Recorder):
    """Records what torch makes of writes, in operators that have rules."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        match func:
            case torch.ops.aten.copy.default:
                return self._copied(args[0], args[1])
            case torch.ops.aten.fill.Tensor:
                return self._copied(args[0], args[1])
            case torch.ops.aten.fill.Scalar:
                with self:
                    return torch.full_like(args[0], args[1])
            case torch.ops.aten.zero.default:
                with self:
                    return torch.zeros_like(args[0])
            case torch.ops.aten.index_put.default if self._is_mask(*args):
                x, (mask,), value = args[:3]
                with self:
                    mask = mask.view(*mask.shape, *[1] * (x.ndim - mask.ndim))
                    return torch.where(mask, value.reshape([]) if value.ndim else value, x)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _copied(self, x: Tensor, source: Tensor) -> Tensor:
        """One value in the place of another, lying in memory as that did."""
        with self:
            if source.dtype != x.dtype:
                source = source.to(x.dtype)
            if source.shape != x.shape:
                source = source.expand(x.shape)
            return source if source.stride() == x.stride() else source.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def _is_mask(x: Tensor, indices: Sequence[Any], value: Tensor, accumulate: bool = False) -> bool:
        """Whether one number is put where a mask is true."""
        one = len(indices) == 1 and indices[0] is not None and indices[0].dtype == torch.bool
        return one and value.numel() == 1 and not accumulate


class _Functional:
    """A walk over a graph, in which what is written over is held in torch's functional tensors, which know their views.

    All other operators are copied as they are, so that composite ones stay whole.
    """

    def __init__(self, unit: Unit, over: set[int]):
        self.unit, self.over = unit, over
        self.nodes = list(unit.graph.nodes)
        self.order = {n: i for i, n in enumerate(self.nodes)}
        self.mode = detect_fake_mode([v for n in self.nodes if isinstance(v := n.meta.get("val"), Tensor)])
        self.recorder = _Recorder()
        self.recorder.constants |= unit.constants
        #: Values by their nodes: tensors, functional ones, or what else an operator gives.
        self.env: dict[fx.Node, Any] = {}
        #: The copies of nodes whose value is no tensor.
        self.copies: dict[fx.Node, fx.Node] = {}
        #: Nodes and memory whose values may have a gradient.
        self.live: set[fx.Node | int | None] = set()

    def run(self) -> Unit:
        graph, u = self.recorder.graph, self.unit
        with _disable_current_modes(), self.mode or contextlib.nullcontext():
            for n in self.nodes:
                seen = len(graph.nodes)
                if n.op == "output":
                    graph.output([self._node(o) for o in n.args[0]])
                else:
                    self._step(n)
                made = reversed(graph.nodes)
                for _ in range(len(graph.nodes) - seen):
                    next(made).meta.setdefault("stack_trace", n.meta.get("stack_trace", ""))
        graph.eliminate_dead_code()
        for n in graph.find_nodes(op="call_function", target=torch.ops.aten.as_strided_scatter.default):
            # Seen in torch 2.13: its gradient is that of the part that is kept, and 0 where the other has one.
            _refuse(
                n,
                "a write through as_strided, or into a value inside of a torch.func gradient",
                "1 gradient would be wrong: that of aten.as_strided_scatter",
                "an index or a slice in the place of as_strided; torch.where or torch.cat in the place of a write",
            )
        used = {n.target for n in graph.find_nodes(op="get_attr")}
        constants = {k: v for k, v in self.recorder.constants.items() if k in used}
        return Unit(u.name, graph, constants, u.regions, u.draws)

    def _step(self, n: fx.Node) -> None:
        read = {s for a in n.all_input_nodes for s in _memory(a)}
        if n.op in ("placeholder", "get_attr"):
            self._copy(n, self._given(n))
        elif n.target is operator.getitem and n.args[0] not in self.copies:
            # One of several results, of which another is a view of what is written over.
            self.env[n] = self.env[n.args[0]][n.args[1]]
            self._flow(n, _memory(n))
        elif n.target in _DETACH and read & self.over:
            self._detach(n)
        elif written(n) or _memory(n) & read & self.over:
            self._again(n)
        else:
            if n.target is torch.ops.fx_feather.constrain.default:
                self._check_constrained(n)
            self._copy(n, n.meta.get("val"))
            self._flow(n, _memory(n))
            if storage(n) in self.over:
                self.env[n] = torch._to_functional_tensor(self.env[n])

    def _given(self, n: fx.Node) -> Any:
        if n.op == "placeholder":
            x = n.meta["val"]
        else:
            x = self.unit.constants[n.target]
            if not isinstance(x, FakeTensor) and not x.is_meta:  # a number of the program's own has no gradient
                return x.to("meta") if self.mode is None else self.mode.from_tensor(x)
        if takes_gradient(x):
            self.live |= {x.untyped_storage()._cdata}
        return x

    def _copy(self, n: fx.Node, value: Any) -> None:
        copy = self.recorder.graph.node_copy(n, self._node)
        copy.meta = dict(n.meta)
        self.env[n] = value
        if isinstance(value, Tensor):
            self.recorder.name(value, copy)
        else:
            self.copies[n] = copy

    def _node(self, n: fx.Node) -> fx.Node:
        return self.copies[n] if n in self.copies else self.recorder.node(self._value(n))

    def _value(self, n: fx.Node) -> Tensor:
        """What a value is by now, after all that was written over it."""
        x = self.env[n]
        if torch._is_functional_tensor(x):
            with _functional(), self.recorder:
                torch._sync(x)
            x = torch._from_functional_tensor(x)
        return x

    def _again(self, n: fx.Node) -> None:
        """Runs a write, or a view of what is written over, on functional tensors."""
        over = written(n)
        stops = bool(n.meta.get(NO_GRAD))
        if stops and over & self.live:
            _refuse(
                n,
                "a write where no gradient is wanted, to a value that may have one",
                "1 gradient would be that of other numbers than these",
                "y = f(x) in the place of the write, under torch.no_grad; or the write outside of it",
            )

        def operand(a: fx.Node) -> Any:
            x = self.env[a]
            if isinstance(x, Tensor) and not torch._is_functional_tensor(x):
                x = torch._to_functional_tensor(x)
            if stops and storage(a) not in over and self._is_live(a) and takes_gradient(x):
                with self.recorder:
                    x = torch._to_functional_tensor(self._value(a).detach())
            return x

        args, kwargs = fx.node.map_arg((n.args, n.kwargs), operand)
        try:
            with _functional(), self.recorder:
                self.env[n] = n.target(*args, **kwargs)
        except (RuntimeError, NotImplementedError) as e:
            if isinstance(e, FeatherError):
                raise
            _refuse(n, f"{type(e).__name__}: {str(e).splitlines()[0]}", "1 write has no functional form")
        if not stops:
            self._flow(n, _memory(n) | over)

    def _flow(self, n: fx.Node, memory: set[int]) -> None:
        """What is made of a value that may have a gradient may have one."""
        if any(self._is_live(a) for a in n.all_input_nodes) and any(takes_gradient(x) for x in _tensors(n)):
            self.live |= {n, *memory}

    def _is_live(self, n: fx.Node) -> bool:
        return n in self.live or bool(_memory(n) & self.live)

    def _detach(self, n: fx.Node) -> None:
        """A detached value shares memory with the one that it is of: a write would be to both."""
        (a,), at, s = n.all_input_nodes, self.order[n], storage(n)
        if s not in self.live and not any(s in written(m) for m in self.nodes[at:]):
            self.env[n] = self.env[a]
            return
        with self.recorder:
            self.env[n] = self._value(a).detach()
        if not any(s in written(m) for m in self.nodes[at:]):
            return
        if any(self.order[u] > at for m in self.nodes[:at] if storage(m) == s for u in m.users):
            _refuse(
                n,
                "a value whose memory is written over, used detached and with its gradient",
                "2 values share 1 memory: a write to one would change the other behind its gradient's back",
                "x.detach().clone() in the place of x.detach(), or of x.data",
            )
        self.env[n] = torch._to_functional_tensor(self.env[n])
        self.live -= {s}

    def _check_constrained(self, n: fx.Node) -> None:
        """On one device a constrained value is the one that it is of: a write to either would be to both."""
        pair = (storage(n), storage(n.all_input_nodes[0]))
        for target, other in (pair, pair[::-1]):
            first = next((i for i, m in enumerate(self.nodes) if i > self.order[n] and target in written(m)), None)
            if first is not None and self._used(other, first):
                _refuse(
                    n,
                    "a value that is written over, and used constrained and unconstrained",
                    "2 values share 1 memory on one device, and none in a program",
                    "x = ff.constrain(x, ...) and no use of what x was before, or x.clone()",
                )

    def _used(self, s: int | None, after: int) -> bool:
        return any(self.order[u] > after for m in self.nodes if storage(m) == s for u in m.users)


def _refuse(n: fx.Node, got: str, number: str, fix: str = "y = x.clone(), or a new value") -> NoReturn:
    fail(
        FeatherError,
        call=f"{_name(n)} at {user_line(n)}",
        got=got,
        number=number,
        rule="a program holds values: each write becomes a new one, if it can be said which",
        fix=fix,
    )


def _tensors(n: fx.Node) -> list[Tensor]:
    val = n.meta.get("val")
    return [x for x in (val if isinstance(val, (list, tuple)) else [val]) if isinstance(x, Tensor)]


def _memory(n: fx.Node) -> set[int]:
    """The memory of all results of a node."""
    return {x.untyped_storage()._cdata for x in _tensors(n)}


@contextlib.contextmanager
def _functional() -> Iterator[None]:
    torch._enable_functionalization(reapply_views=True)
    try:
        yield
    finally:
        torch._disable_functionalization()
