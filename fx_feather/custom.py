"""Functions with a backward of their own: a `torch.autograd.Function` of the user's, as one operator of a trace."""

import dataclasses
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import Function, FunctionCtx, _is_setup_context_defined
from torch.fx.experimental.proxy_tensor import get_proxy_mode, track_tensor
from torch.utils._python_dispatch import _disable_current_modes

from .errors import FeatherError, fail
from .source import note_line, noted_line, this_line
from .unit import Aval, Unit

#: Traces a function of tensors to a unit.
Trace = Callable[[Callable[..., list[torch.Tensor]], list[Aval], str], Unit]


@dataclasses.dataclass(frozen=True)
class Custom:
    """One call of such a function.

    A backward is linear in its cotangents, as every vjp is: a program pulls back the sum of losses and divides by the
    count of all microbatches and ranks after it.

    Attributes:
        forward: from its tensors to its results.
        backward: from its tensors, its results and a cotangent of each result that may have one, to a gradient for each
            tensor that may have one. What the forward saves beside arguments and results is computed again.
        fixed: numbers of the results that have no gradient.
    """

    forward: Unit
    backward: Unit
    fixed: frozenset[int]


class _Context(FunctionCtx):
    """What a forward leaves for its backward."""

    def __init__(self, name: str, needs: tuple[bool, ...]):
        self.name, self.needs_input_grad = name, needs
        self._saved: tuple[Any, ...] = ()
        self._fixed: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self._saved = tensors

    def save_for_forward(self, *tensors: Any) -> None:
        """Serves forward-mode differentiation, which a program has none of."""

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        return self._saved

    def mark_non_differentiable(self, *tensors: Any) -> None:
        self._fixed = tensors

    def mark_dirty(self, *tensors: Any) -> None:
        _refuse(self.name, "ctx.mark_dirty", "1 argument would be written over", "a new tensor as the result")

    def set_materialize_grads(self, value: bool) -> None:
        """A cotangent that is nobody's is zeros, which counts the same."""

    def replaced(self, pairs: Sequence[tuple[Any, Any]]) -> None:
        """Puts values in the place of others among what was saved."""
        known = {id(old): new for old, new in pairs}
        self._saved = tuple(known.get(id(x), x) for x in self._saved)
        for k, v in list(vars(self).items()):
            if id(v) in known:
                setattr(self, k, known[id(v)])


def call(cls: type[Function], args: Sequence[Any], trace: Trace) -> tuple[Custom, list[torch.Tensor], bool]:
    """Traces one call of a function; gives it, its tensors, and whether it has one result alone.

    Raises:
        FeatherError: what it does beside giving tensors and their gradients, which a program would lose.
    """
    name = cls.__name__
    at = [i for i, x in enumerate(args) if isinstance(x, torch.Tensor)]
    tensors = [args[i] for i in at]
    needs = tuple(isinstance(x, torch.Tensor) and _has_gradient(x) for x in args)
    single = False
    fixed: frozenset[int] = frozenset()

    def run(given: Sequence[torch.Tensor]) -> tuple[_Context, list[torch.Tensor]]:
        nonlocal single, fixed
        full, ctx = list(args), _Context(name, needs)
        for i, x in zip(at, given, strict=True):
            full[i] = x
        if _is_setup_context_defined(cls.setup_context):
            out = cls.forward(*full)
            cls.setup_context(ctx, tuple(full), out)
        else:
            out = cls.forward(ctx, *full)
        single = not isinstance(out, (tuple, list))
        outs = [out] if single else list(out)
        wrong = [type(x).__name__ for x in outs if not isinstance(x, torch.Tensor)]
        if wrong:
            _refuse(name, f"results of type {', '.join(wrong)}", f"{len(wrong)} results are no tensors", "tensors only")
        marked = {id(x) for x in ctx._fixed}
        fixed = frozenset(i for i, x in enumerate(outs) if id(x) in marked or not _has_gradient(x))
        return ctx, outs

    def forward(*given: torch.Tensor) -> list[torch.Tensor]:
        # A value that is returned as it is, or twice, would have two owners.
        return [torch.ops.aten.alias(x) for x in run(given)[1]]

    avals = [Aval.of(x) for x in tensors]
    traced = trace(forward, avals, name)
    results = [Aval.of(n.meta["val"]) for n in traced.outputs]
    wanted = [i for i in range(len(results)) if i not in fixed]

    def backward(*given: torch.Tensor) -> list[torch.Tensor]:
        own, outs, cts = given[: len(at)], given[len(at) : len(at) + len(results)], given[len(at) + len(results) :]
        ctx, again = run(own)
        ctx.replaced(list(zip(again, outs, strict=True)))
        full: list[Any] = [None] * len(results)
        for i, ct in zip(wanted, cts, strict=True):
            full[i] = ct
        grads = cls.backward(ctx, *full)
        grads = list(grads) if isinstance(grads, (tuple, list)) else [grads]
        if len(grads) < len(args) or any(g is not None for g in grads[len(args) :]):
            _refuse(
                name, f"{len(grads)} gradients of backward", f"forward has {len(args)} arguments",
                "one gradient, or None, for each argument of forward but ctx",
            )  # fmt: skip
        return [_like(name, grads[i], x) for i, x in zip(at, own, strict=True) if _has_gradient(x)]

    pulled = trace(backward, [*avals, *results, *(results[i] for i in wanted)], f"{name}.backward")
    if traced.draws or pulled.draws:
        _refuse(name, "random numbers", "1 mask would be drawn twice", "an argument that is drawn outside of it")
    return Custom(traced, pulled, fixed), tensors, single


def operands_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor | fx.Node]:
    """The nodes of tensors; those that come straight from outside have none."""
    tracer = get_proxy_mode().tracer
    # A tensor from outside becomes a value of the trace.
    tensors = [x if isinstance(x, FakeTensor) else torch.ops.aten.alias(x) for x in tensors]
    known = [tracer.tensor_tracker.get(x) for x in tensors]
    return [x if k is None else k.proxy.node for x, k in zip(tensors, known, strict=True)]


def results_of(node: fx.Node, out: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Makes tensors the results of a node that was made by hand."""
    tracer = get_proxy_mode().tracer
    note_line()
    with torch._C.DisableTorchFunction():  # else each question about a size is one for the modes of the trace
        for i, x in enumerate(out):
            item = tracer.graph.call_function(operator.getitem, (node, i))
            item.meta |= {"val": x, "stack_trace": noted_line()}
            track_tensor(x, fx.Proxy(item, tracer), constant=None, tracer=tracer)
    return list(out)


def emit(cls: type[Function], args: Sequence[Any], trace: Trace) -> Any:
    """Puts a call of a function into the trace that is under way; gives its results."""
    note_line()
    custom, tensors, single = call(cls, args, trace)
    tensors = [torch.ops.aten.alias(x) for x in tensors]
    node = get_proxy_mode().tracer.graph.call_function(torch.ops.fx_feather.custom.default, (operands_of(tensors),))
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        mode = detect_fake_mode(tensors)
        outs = [n.meta["val"] for n in custom.forward.outputs]
        made = [FakeTensor(mode, torch.empty_like(x, device="meta"), x.device) for x in outs]
    node.meta |= {"function": custom, "val": made}
    results = [x.detach() if i in custom.fixed else x for i, x in enumerate(results_of(node, made))]
    return results[0] if single else tuple(results)


def _has_gradient(x: torch.Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _like(name: str, grad: Any, x: torch.Tensor) -> torch.Tensor:
    """A gradient as autograd takes it: of the shape and dtype of what it is of."""
    if grad is None:
        return torch.zeros_like(x)
    if not isinstance(grad, torch.Tensor) or torch.broadcast_shapes(grad.shape, x.shape) != grad.shape:
        got = f"a gradient of shape {list(getattr(grad, 'shape', []))}"
        _refuse(name, got, f"the argument has shape {list(x.shape)}", "a gradient of the argument's shape")
    return grad.sum_to_size(x.shape).to(x.dtype)


def _refuse(name: str, got: str, number: str, fix: str) -> NoReturn:
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    fail(
        FeatherError,
        call=f"{name}.apply at {this_line()}",
        got=got,
        number=number,
        rule="a torch.autograd.Function is one operator of a trace: tensors, and their gradients by its backward",
        fix=f'{fix}; or an operator of your own: @torch.library.custom_op("mylib::{snake}", mutates_args=()), '
        f'and ff.rule("mylib::{snake}", "... -> ...", vjp=fn)',
    )
