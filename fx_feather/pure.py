"""What a function that is traced may not do, because a trace would lose it without a word: it is refused by name."""

import contextlib
import operator
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar

import torch
from torch import fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
)
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import TorchFunctionMode

from . import tree
from .errors import FeatherError, RuleError, ShapeError, fail
from .functions import OPERATOR, Functions, seen_functions
from .random_ops import refuse_generator
from .source import is_machinery, line_of, note_line, this_line, user_line

_T = TypeVar("_T")

#: Asking autograd for a gradient: a trace records operators, not what autograd makes of them.
_TAPE = {
    torch.autograd.grad: "torch.autograd.grad",
    torch.Tensor.backward: "backward",
    torch.Tensor.requires_grad_: "requires_grad_",
    torch.Tensor.requires_grad.__set__: "requires_grad = ...",  # type: ignore[attr-defined]
}
#: In the meta of nodes that were recorded where no gradient is wanted: what they write into has none from there.
NO_GRAD = "no_grad"
_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_REQUIRES_GRAD = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_HOOKS = {
    torch.Tensor.register_hook: "register_hook",
    torch.Tensor.register_post_accumulate_grad_hook: "register_post_accumulate_grad_hook",
}


_TRANSFORMS = torch._functorch.eager_transforms.__file__


class Transformed(BaseException):
    """A transform of torch.func is met in a trace of composite operators, from which it hides its values."""


def transforming() -> bool:
    """Whether a transform of torch.func is at work, such as vmap: its values have other dims than the function's."""
    return torch._C._functorch.maybe_current_level() is not None


def lowered(trace: Callable[[bool], _T]) -> _T:
    """What a trace gives; where it meets a transform, what one of simple operators gives."""
    try:
        return trace(False)
    except Transformed:
        return trace(True)


def _in_transform() -> bool:
    """Whether torch.func itself is what asks, as it does for a pullback when its transform is over."""
    frame: Any = sys._getframe(2)
    while frame is not None and is_machinery(frame.f_code.co_filename):
        if frame.f_code.co_filename == _TRANSFORMS:
            return True
        frame = frame.f_back
    return False


def _only_vmap() -> bool:
    stack = torch._C._functorch.get_interpreter_stack() or []
    return all(level.key() == torch._C._functorch.TransformType.Vmap for level in stack)


def _refuse_unwanted(what: str) -> NoReturn:
    fail(
        FeatherError,
        call=f"a torch.func transform in {what}, at {this_line()}",
        got="a transform of gradients where no gradient is wanted of its result",
        number="1 gradient would be there nevertheless: a transform turns it on for what it computes",
        rule="a trace holds operators: what has no gradient is detached where it is made",
        fix="torch.func.grad(f)(x).detach(), outside of torch.no_grad",
    )


class _Traced(TorchFunctionMode):
    """Sees each operator before it is recorded: notes the user's line, and keeps a gradient from where torch has none.

    `make_fx` can keep stack traces by itself, but only of functions that are called `forward`.
    """

    def __init__(self, what: str, region: bool):
        super().__init__()
        self.what, self.region = what, region
        self.level = torch._C._functorch.maybe_current_level()
        #: Whether a gradient is wanted, outside of transforms: each has a mode of its own.
        self.wanted = torch.is_grad_enabled()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        note_line()
        if func is torch._C._set_grad_enabled:
            # A node for it would have to keep its place; what it means is written at each operator instead.
            if torch._C._functorch.maybe_current_level() == self.level:
                self.wanted = args[0]
            with torch._C.DisableTorchFunction():
                return func(*args, **kwargs)
        transformed = torch._C._functorch.maybe_current_level() != self.level
        if transformed and not self.region:
            raise Transformed
        unwanted = not self.wanted or torch.is_inference_mode_enabled()
        if transformed and unwanted and not _only_vmap():
            _refuse_unwanted(self.what)
        if func == _DATA:
            return args[0].detach()
        if func == _REQUIRES_GRAD and not is_machinery(sys._getframe(1).f_code.co_filename):
            _refuse_question(self.what)
        inside = transformed or (func in _TAPE and _in_transform())
        if not (inside and self.region) and (func in _TAPE or kwargs.get("requires_grad")):
            _refuse_tape(_TAPE.get(func, "requires_grad=True"), self.what, self.region)
        if kwargs.get("generator") is not None:
            refuse_generator(getattr(func, "__name__", str(func)), this_line())
        _check_target(func, args, kwargs, self.what)
        if func in _HOOKS:
            _refuse_hook(_HOOKS[func], self.what)
        if torch.is_grad_enabled():
            return func(*args, **kwargs)
        tracer = getattr(get_proxy_mode(), "tracer", None)
        last = next(reversed(tracer.graph.nodes), None) if tracer is not None else None
        out = func(*args, **kwargs)
        for n in reversed(tracer.graph.nodes) if tracer is not None else ():
            if n is last:
                break
            n.meta[NO_GRAD] = True
        return without_gradient(out, (args, kwargs))


_IN_PLACE = re.compile(
    r"__setitem__|__i(add|sub|mul|div|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift)__|\w*[a-z0-9]_"
)


def _check_target(func: Any, args: Any, kwargs: dict[str, Any], what: str) -> None:
    """Refuses a write to a tensor from outside before it happens: tracing leaves no trace."""
    name = getattr(func, "__name__", "")
    over = _IN_PLACE.fullmatch(name) is not None
    for x in tree.leaves([args[:1] if over else (), kwargs.get("out")]):
        hidden = not isinstance(x, torch.Tensor) or torch._C._functorch.is_functorch_wrapped_tensor(x)
        if hidden or isinstance(x, FakeTensor) or x.is_meta:
            continue
        fail(
            FeatherError,
            call=f"{name} in {what}, at {this_line()}",
            got=f"a write to a tensor from outside, of shape {list(x.shape)}",
            number="1 tensor would change while the function is traced, and never again",
            rule="a traced function is pure: it may write to what it made itself, and to nothing else",
            fix="x = x.clone() before it, or an operator that gives a new value",
        )


def takes_gradient(x: torch.Tensor) -> bool:
    """Whether a tensor is of a dtype that has gradients: floating point or complex."""
    return x.is_floating_point() or x.is_complex()


def without_gradient(out: Any, args: Any) -> Any:
    """The results of an operator that ran where no gradient is wanted; what only handed an argument on has its own."""
    leaves, treedef = tree.flatten(out)
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    if not any(map(takes_gradient, tensors)):
        return out
    given = {id(x) for x in tree.leaves(args)}
    kept = [
        x if not isinstance(x, torch.Tensor) or id(x) in given or not takes_gradient(x) else x.detach() for x in leaves
    ]
    return tree.unflatten(treedef, kept)


@contextlib.contextmanager
def transforms(what: str) -> Iterator[None]:
    """What torch can't transform is refused at its line, within a trace that sees through transforms."""
    try:
        yield
    except (RuntimeError, NotImplementedError) as e:
        if isinstance(e, FeatherError):
            raise
        _refuse_formula(what, line_of(e), f"{type(e).__name__}: {str(e).splitlines()[0]}")


def _refuse_formula(what: str, where: str, got: str) -> NoReturn:
    fail(
        FeatherError,
        call=f"{what} at {where}",
        got=got,
        number="1 function can't be traced through the torch.func transform that it uses",
        rule="a transform is traced operator by operator, on shapes alone",
        fix="the formula that the transform stands for; for a Hessian, torch.func.jacrev of torch.func.grad",
    )


def _refuse_question(what: str) -> NoReturn:
    fail(
        FeatherError,
        call=f"x.requires_grad in {what}, at {this_line()}",
        got="a question that a trace has no answer to",
        number="1 branch would be frozen: while a function is traced no tensor requires a gradient",
        rule="a traced function is one for all values, and is the same whether its gradient is taken or not",
        fix="an argument that is no tensor, such as train=True, in the place of the question; x.detach() where no "
        "gradient is wanted",
    )


def _refuse_tape(name: str, what: str, region: bool) -> NoReturn:
    fail(
        FeatherError,
        call=f"{name} in {what}, at {this_line()}",
        got="a gradient that is asked of autograd while the function is traced",
        number=f"1 call of {name} would be lost: a trace holds operators and no autograd graph",
        rule="a traced function is pure: tensors come in as arguments, and who calls it takes the gradient",
        fix="torch.func.grad(f)(x)" if region else "ff.value_and_grad(loss_fn) around the whole loss",
    )


def _refuse_hook(name: str, what: str) -> NoReturn:
    fail(
        FeatherError,
        call=f"{name} in {what}, at {this_line()}",
        got="a hook on a gradient",
        number=f"1 call of {name} would be lost: a trace holds operators and no autograd graph",
        rule="what happens to a gradient on its way back belongs to an operator, which is recorded by its name",
        fix=OPERATOR.format(name="my_op"),
    )


@contextlib.contextmanager
def _known_operators(what: str) -> Iterator[None]:
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as e:
        shape = isinstance(e, DynamicOutputShapeException)
        fail(
            FeatherError,
            call=f"{what} at {line_of(e)}",
            got=f"the operator {e.func}",
            number="the shape of its result depends on values" if shape else "Python asks for the value of a tensor",
            rule="a function is traced once, for all values: its branches and shapes can't depend on them",
            fix="torch.where(mask, x, 0.0) in place of x[mask]"
            if shape
            else "torch.where(condition, a, b) in place of if",
        )
    except UnsupportedOperatorException as e:
        _refuse_shapeless(str(e.func.name()).partition(".")[0], f"{what}, at {line_of(e)}")
    except RuntimeError as e:
        if "must override the setup_context" in str(e):
            _refuse_formula(what, line_of(e), "a torch.autograd.Function without setup_context in a transform")
        if "no fake impl registered" not in str(e):
            raise
        _refuse_shapeless(str(e).partition("CustomOpDef(")[2].partition(")")[0], f"{what}, at {line_of(e)}")


def _refuse_shapeless(name: str, where: str) -> NoReturn:
    fail(
        RuleError,
        call=f"{name} in {where}",
        got=f"the operator {name} on tensors without values",
        number="no function says what shape and dtype its results have",
        rule="a function is traced on shapes alone, so each operator has to say those of its results",
        fix=f'torch.library.register_fake("{name}", fn) with fn(*args) -> an empty tensor like the result',
    )


def watched(
    fn: Callable[..., Any], what: str, functions: Functions | None = None, region: bool = False
) -> Callable[..., Any]:
    """`fn`, to be traced: operators remember the user's line, and what a trace would lose is refused.

    Operators under `torch.no_grad` or `torch.inference_mode` have no gradient in the trace either.

    Args:
        fn: the function.
        what: its name in messages.
        functions: what a call of a torch.autograd.Function gives, from the class and its arguments; they are refused
            without.
        region: whether its trace sees through torch.func transforms, as one of simple operators does.

    Raises:
        FeatherError: code that depends on the values of tensors, which a trace doesn't know; a torch.autograd.Function
            inside of a transform; a gradient taken inside.
        RuleError: an operator that doesn't say the shapes of its results.
    """

    def run(*args: Any) -> Any:
        with (
            _known_operators(what),
            fx_traceback.preserve_node_meta(),
            seen_functions(functions),
            _Traced(what, region),
        ):
            return fn(*args)

    return run


def check_recorded(graph: fx.Graph, what: str) -> None:
    """Raises FeatherError if something was recorded that is no operator; takes out contexts that do nothing."""
    enter, leave = torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast
    for n in reversed(list(graph.nodes)):
        device = n.kwargs.get("device")
        if isinstance(device, torch.device) and device.type == "meta":
            _refuse_formula(what, user_line(n), f"the operator {n.target} on the device meta")
        if n.op != "call_function" or isinstance(n.target, torch._ops.OpOverload) or n.target is operator.getitem:
            continue
        if n.target in (enter, leave):
            if n.target is leave or n.args[2] is False:
                graph.erase_node(n)
                continue
            fail(
                FeatherError,
                call=f"torch.autocast in {what}, around {user_line(n.next)}",
                got=f"torch.autocast({', '.join(map(repr, n.args))})",
                number="1 context would be lost: it changes operators by what they are called in",
                rule="a trace holds operators, and the precision that a program computes in is its layout's",
                fix="ff.Layout(..., precision=ff.Precision(compute=torch.bfloat16)), or x.to(...) in the model",
            )
        fail(
            FeatherError,
            call=f"{getattr(n.target, '__name__', n.target)} in {what}, at {user_line(n)}",
            got=f"a call of {n.target}, which is no operator",
            number="1 call that a trace can't hold",
            rule="a trace holds operators of torch.ops, each with a rule of its own",
            fix="leave the call out, or make it outside of the function",
        )


def check_outputs(outs: list[Any], what: str) -> None:
    """Raises ShapeError if a result is no tensor."""
    for x in outs:
        if not isinstance(x, torch.Tensor):
            fail(
                ShapeError,
                call=what,
                got=f"an output of type {type(x).__name__}",
                number=f"{x!r} is not a tensor",
                rule="a traced function returns a pytree of tensors: a Python number would be frozen at trace time",
                fix=tree.as_node(x, "torch.as_tensor(...), or leave it out of the result"),
            )
