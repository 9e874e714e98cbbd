"""Differentiation: the vjp of a local unit, traced with it to one joint graph and cut into forward and backward."""

import contextlib
import dataclasses
import operator
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from ..errors import FeatherError, RuleError, message
from ..memory import writes
from ..mesh import Mesh
from ..program import BY_OP, Func
from ..record import record
from ..spec import Type
from .cleanup import cleanup
from .partition import LocalFn


@dataclasses.dataclass
class LocalUnit:
    """A unit as one rank computes it.

    Attributes:
        forward: inputs -> outputs, then the values that the backward needs.
        outputs: how many of the forward's results are the unit's outputs.
        backward: (inputs named by `keeps`, saved values, cotangents named by `cts`) -> cotangents named by `grads`.
        keeps: numbers of the inputs that the backward needs again.
        cts: numbers of the outputs whose cotangents it takes.
        grads: numbers of the inputs whose cotangents it gives.
    """

    forward: Func
    outputs: int
    backward: Func | None = None
    keeps: tuple[int, ...] = ()
    cts: tuple[int, ...] = ()
    grads: tuple[int, ...] = ()

    @property
    def saved_nodes(self) -> list[fx.Node]:
        """The nodes of the values that the forward saves for the backward."""
        return list(self.forward.graph.output_node().args[0])[self.outputs :]

    @property
    def saved_bytes(self) -> int:
        """Bytes of these values."""
        saved = [n.meta["val"] for n in self.saved_nodes]
        return sum(x.numel() * x.element_size() for x in saved)


class Place(NamedTuple):
    """How a local value lies in memory: a trace holds views that depend on it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, x: torch.Tensor) -> "Place":
        return cls(tuple(x.shape), tuple(x.stride()), x.dtype)

    @classmethod
    def contiguous(cls, t: Type, mesh: Mesh) -> "Place":
        return cls.of(torch.empty(t.local_shape(mesh), dtype=t.dtype, device="meta"))

    def fake(self, device: str) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)


def trace_local(fn: Callable[..., list[torch.Tensor]], places: Sequence[Place], device: str, name: str) -> Func:
    """Traces a function of local values, given how its arguments lie in memory."""
    # Nothing but shapes matters on the meta device, where an operator costs a fraction of a fake one; elsewhere the
    # device decides which kernels composite operators are made of.
    with contextlib.nullcontext() if device == "meta" else FakeTensorMode(allow_non_fake_inputs=True):
        fakes = [p.fake(device) for p in places]
        recorded = record(fn, fakes)
        if any(writes(n) for n in recorded.graph.nodes):
            # Formulas of torch fill buffers, also through views. Cutting a graph follows values, not memory, so each
            # write becomes a value of its own. Few units have any.
            recorded = record(torch.func.functionalize(recorded.replay), fakes)
    cleanup(recorded.graph)
    return Func(name, recorded.graph, recorded.constants)


@dataclasses.dataclass
class Joint:
    """Forward and backward of a unit as one graph, from its inputs and cotangents to its outputs and theirs.

    Attributes:
        whole: the graph.
        inputs, outputs: how many of its operands are inputs, and of its results outputs.
        diff: numbers of the inputs whose cotangents it gives.
        cts: numbers of the outputs whose cotangents it takes.
    """

    whole: Func
    inputs: int
    outputs: int
    diff: list[int]
    cts: list[int]

    def cut(self, remat: str = "none") -> LocalUnit:
        """The forward and the backward; `remat` is a policy of `REMAT`."""
        return _cut(self.whole, self.inputs, self.outputs, self.diff, self.cts, remat)


def linearize(
    local: LocalFn, places: Sequence[Place], needs: Sequence[bool], cts: Sequence[bool], device: str, name: str
) -> Joint:
    """The forward and the backward of a local unit, to be cut apart.

    Args:
        local: the function of local inputs.
        places: how its inputs lie in memory. Cotangents come in contiguous.
        needs: which inputs need a cotangent.
        cts: which outputs have one.
        device: device type to trace for.
        name: of the functions.
    """
    diff = [i for i, need in enumerate(needs) if need]
    with_ct = [i for i, c in enumerate(cts) if c]
    n_in = len(places)

    def joint(*flat: torch.Tensor) -> list[torch.Tensor]:
        primals, given = list(flat[:n_in]), flat[n_in:]

        def f(*inner: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor]]:
            full = list(primals)
            for i, x in zip(diff, inner, strict=True):
                full[i] = x
            outs = local(*full)
            return tuple(outs[i] for i in with_ct), outs

        try:
            _, pull, outs = torch.func.vjp(f, *(primals[i] for i in diff), has_aux=True)  # type: ignore[misc]
            # Programs differentiate once: without a graph of the backward, operators take their short formulas.
            with torch.no_grad():
                return [*outs, *pull(tuple(given))]
        except (RuntimeError, NotImplementedError) as e:
            if isinstance(e, FeatherError):
                raise
            _refuse(name, e)

    # Cotangents of one type may come in any strides; those of the outputs are what the later units most likely give.
    with FakeTensorMode(allow_non_fake_inputs=True):
        outs = local(*(p.fake(device) for p in places))
    cts_in = [Place.of(torch.empty(outs[i].shape, dtype=outs[i].dtype, device="meta")) for i in with_ct]
    whole = trace_local(joint, [*places, *cts_in], device, name)
    return Joint(whole, n_in, len(outs), diff, with_ct)


def _refuse(name: str, error: BaseException) -> NoReturn:
    """The forward ran before, so what fails now is its gradient."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    found = re.search(r"derivative for '?(?:aten::)?(\w+)", text)
    op = f"aten::{found[1]}" if found else "namespace::operator"
    parts = message(
        call=f"the gradient of {name}",
        got=f"{type(error).__name__}: {text}",
        number=f"torch.func can't differentiate {op if found else 'one of its operators'}",
        rule="a unit's gradient is taken by torch.func.vjp, operator by operator",
        fix=f'ff.rule("{op}", pattern, vjp=fn) with fn(ct, result, *args) -> gradients of its tensor operands; '
        "or detach its operands",
    )
    raise RuleError(parts) from error


_VIEWS = {
    getattr(torch.ops.aten, name)
    for name in (
        "view",
        "t",
        "transpose",
        "permute",
        "unsqueeze",
        "squeeze",
        "expand",
        "slice",
        "select",
        "alias",
        "detach",
    )
}


def _is_view(n: fx.Node) -> bool:
    return getattr(n.target, "overloadpacket", None) in _VIEWS


_COPIES = {torch.ops.aten.clone, torch.ops.aten._unsafe_view, torch.ops.aten._to_copy}


def _is_moved_input(n: fx.Node) -> bool:
    """Whether a value is an input in another order or dtype: keeping it would keep a gathered parameter alive."""
    while _is_view(n) or getattr(n.target, "overloadpacket", None) in _COPIES:
        n = n.all_input_nodes[0]
    return n.op == "placeholder"


#: What a forward keeps for the backward: all that it uses (views are made anew); the results of matmuls, attention and
#: collectives; or nothing but the inputs. The rest is computed again, by the same operators: each keeps results bit for
#: bit, as far as operators give the same bits twice.
REMAT = ("none", "selective", "full")

_HEAVY = {
    getattr(torch.ops.aten, name)
    for name in (
        "mm",
        "bmm",
        "addmm",
        "baddbmm",
        "addmv",
        "mv",
        "convolution",
        "_grouped_mm",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
    if hasattr(torch.ops.aten, name)
}


def _is_heavy(n: fx.Node) -> bool:
    if n.target is operator.getitem:
        n = n.args[0]
    return n.target in BY_OP or getattr(n.target, "overloadpacket", None) in _HEAVY


def _cut(whole: Func, n_in: int, n_out: int, diff: list[int], with_ct: list[int], remat: str) -> LocalUnit:
    nodes = list(whole.graph.nodes)
    order = {n: k for k, n in enumerate(nodes)}
    placeholders = [n for n in nodes if n.op == "placeholder"]
    primals, ct_nodes = placeholders[:n_in], placeholders[n_in:]
    results = list(whole.graph.output_node().args[0])
    outs, grads = results[:n_out], results[n_out:]
    forward = _ancestors(outs) - set(placeholders)
    # An operator with several results is saved by those of its results that the backward uses.
    forward |= {n for n in nodes if n.target is operator.getitem and n.args[0] in forward}

    def worth(n: fx.Node) -> bool:
        return remat == "none" or (remat == "selective" and _is_heavy(n))

    # What the backward takes from the forward: saved, or computed again.
    saved: dict[fx.Node, None] = {}
    again: set[fx.Node] = set()

    def need(root: fx.Node) -> None:
        stack = [root]
        while stack:
            n = stack.pop()
            if n.op == "placeholder" or n in again or n in saved:
                continue
            if n.op == "get_attr" or _is_view(n) or not worth(n) or _is_moved_input(n):
                again.add(n)
                stack.extend(reversed(n.all_input_nodes))
            else:
                saved[n] = None

    wanted = _ancestors(grads)
    backward = [n for n in nodes if n in wanted and n not in forward and n.op not in ("placeholder", "output")]
    for n in backward:
        for a in n.all_input_nodes:
            if a in forward:
                need(a)
    for g in grads:
        if g in forward:
            need(g)
    fwd = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    for p in primals:
        copied[p] = _placeholder(fwd, p)
    for n in nodes:
        if n in forward:
            copied[n] = fwd.node_copy(n, lambda x: copied[x])
    fwd.output([copied[o] for o in outs] + [copied[s] for s in saved])

    bwd = fx.Graph()
    inside: dict[fx.Node, fx.Node] = {}
    used = {a for n in (*backward, *again) for a in n.all_input_nodes} | set(grads)
    keeps = tuple(i for i, p in enumerate(primals) if p in used)
    for n in (*(primals[i] for i in keeps), *saved, *ct_nodes):
        inside[n] = _placeholder(bwd, n)
    for n in sorted({*again, *backward}, key=lambda n: order[n]):
        if n not in inside:
            inside[n] = bwd.node_copy(n, lambda x: inside[x])
    bwd.output([inside[g] for g in grads])

    def constants(graph: fx.Graph) -> dict[str, torch.Tensor]:
        return {n.target: whole.constants[n.target] for n in graph.nodes if n.op == "get_attr"}

    return LocalUnit(
        Func(f"{whole.name}.forward", fwd, constants(fwd), computes=True),
        n_out,
        Func(f"{whole.name}.backward", bwd, constants(bwd), computes=True),
        keeps,
        tuple(with_ct),
        tuple(diff),
    )


def _placeholder(graph: fx.Graph, n: fx.Node) -> fx.Node:
    p = graph.placeholder(n.name)
    p.meta = dict(n.meta)
    return p


def _ancestors(roots: Sequence[fx.Node]) -> set[fx.Node]:
    seen: set[fx.Node] = set()
    stack = list(roots)
    while stack:
        n = stack.pop()
        if n not in seen:
            seen.add(n)
            stack.extend(n.all_input_nodes)
    return seen
