"""Recording: runs a function on fake tensors and keeps its operators as an FX graph, at a fraction of a full trace's cost."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode


class Recorder(TorchDispatchMode):
    """Records each operator below autograd, so a vjp that is taken inside is part of the graph.

    `make_fx` does the same and more (symbolic shapes, module names, constants to fold), at about five times the cost
    an operator; local programs are large and need none of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.constants: dict[str, torch.Tensor] = {}
        #: By identity; the tensors are kept, so that no other takes their place.
        self._nodes: dict[int, tuple[torch.Tensor, fx.Node]] = {}

    def placeholder(self, x: torch.Tensor) -> None:
        self._name(x, self.graph.placeholder(f"x{len(self._nodes)}"))

    def node(self, x: torch.Tensor) -> fx.Node:
        """The node of a tensor; one that came from outside is a constant."""
        known = self._nodes.get(id(x))
        if known is None:
            name = f"_constant{len(self.constants)}"
            self.constants[name] = x
            self._name(x, self.graph.create_node("get_attr", name))
            known = self._nodes[id(x)]
        return known[1]

    def _name(self, x: torch.Tensor, n: fx.Node) -> None:
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
        if isinstance(out, torch.Tensor):
            self._name(out, n)
            return
        n.meta["val"] = out
        for i, x in enumerate(out if isinstance(out, (list, tuple)) else []):
            if isinstance(x, torch.Tensor):
                item = self.graph.call_function(operator.getitem, (n, i))
                self._name(x, item)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.namespace != "prim":  # questions about a tensor's device or layout
            self.emit(func, args, kwargs, out)
        return out


def record(fn: Callable[..., Sequence[torch.Tensor]], fakes: Sequence[torch.Tensor]) -> Recorder:
    """Records `fn(*fakes)`; the graph's output is the list of its results. Call it inside of a fake tensor mode."""
    recorder = Recorder()
    for x in fakes:
        recorder.placeholder(x)
    with recorder:
        outs = fn(*fakes)
    recorder.graph.output([recorder.node(x) for x in outs])
    return recorder


def active_recorder() -> Recorder:
    """The recorder that is on, innermost."""
    mode = _get_current_dispatch_mode()
    assert isinstance(mode, Recorder), "a function is being recorded"
    return mode


def place(graph: fx.Graph, device: str) -> None:
    """Lets operators of a graph recorded on the meta device make their tensors on a real one."""
    for n in graph.nodes:
        made = n.kwargs.get("device")
        if isinstance(made, torch.device) and made.type == "meta":
            n.update_kwarg("device", torch.device(device))
