"""Operators with a handwritten backward: the vjp of a rule, run in the place of autograd's own formula."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch.overrides import TorchFunctionMode

from .. import tree
from ..errors import RuleError, fail
from ..spec import Type
from .rule import RULES

#: From the cotangents, the results and the operator's own arguments to a gradient for each tensor among these.
Vjp = Callable[..., Any]

# Whose operators have formulas that torch.func can differentiate, or say themselves that there is none.
_BUILT_IN = ("aten", "prim", "prims", "fx_feather")
_KEYS = ("Autograd", "AutogradCPU", "AutogradCUDA", "CompositeImplicitAutograd")


@dataclasses.dataclass(frozen=True)
class _Call:
    """One call of an operator, with places in its arguments for tensors."""

    target: Any
    vjp: Vjp
    leaves: tuple[Any, ...]
    treedef: tree.TreeDef

    def arguments(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = iter(tensors)
        leaves = [next(given) if isinstance(x, _Place) else x for x in self.leaves]
        args, kwargs = tree.unflatten(self.treedef, leaves)
        return args, kwargs


class _Place:
    """Stands for a tensor."""


class _Handwritten(torch.autograd.Function):
    """An operator whose cotangents are pulled back by the function that its rule names."""

    @staticmethod
    def forward(call: _Call, *tensors: torch.Tensor) -> Any:
        args, kwargs = call.arguments(tensors)
        out = call.target(*args, **kwargs)
        return tuple(out) if isinstance(out, (list, tuple)) else out

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.call, *tensors = inputs
        ctx.single = isinstance(output, torch.Tensor)
        results = [output] if ctx.single else list(output)
        ctx.mark_non_differentiable(*(x for x in results if not x.is_floating_point()))
        ctx.save_for_backward(*tensors, *results)
        ctx.count = len(tensors)

    @staticmethod
    def backward(ctx: Any, *cts: torch.Tensor) -> Any:
        tensors = ctx.saved_tensors[: ctx.count]
        grads = iter(_Pulled.apply(ctx.call, ctx.count, ctx.single, *ctx.saved_tensors, *cts))
        return None, *(next(grads) if x.is_floating_point() else None for x in tensors)


class _Pulled(torch.autograd.Function):
    """The vjp itself as one operator, so that it may use others that torch.func can't look into."""

    @staticmethod
    def forward(call: _Call, operands: int, single: bool, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        middle = (len(given) + operands) // 2
        tensors, outs, cts = given[:operands], given[operands:middle], given[middle:]
        wanted: list[Any] = [ct if out.is_floating_point() else None for ct, out in zip(cts, outs, strict=True)]
        args, kwargs = call.arguments(tensors)
        grads = call.vjp(wanted[0] if single else tuple(wanted), outs[0] if single else outs, *args, **kwargs)
        checked = _checked(call.target, tensors, grads)
        pairs = [(g, x) for g, x in zip(checked, tensors, strict=True) if x.is_floating_point()]
        # A cotangent that is handed on as it came is an operand that is returned, which torch does not save.
        return tuple(torch.zeros_like(x) if g is None else torch.ops.aten.alias(g) for g, x in pairs)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.call, ctx.operands, ctx.single, *given = inputs
        ctx.save_for_backward(*given)

    @staticmethod
    def backward(ctx: Any, *cts: torch.Tensor) -> Any:
        given = ctx.saved_tensors
        at = [i for i, x in enumerate(given) if x.is_floating_point()]

        def again(*floats: torch.Tensor) -> tuple[torch.Tensor, ...]:
            full = list(given)
            for i, x in zip(at, floats, strict=True):
                full[i] = x
            with Handwritten():
                return _Pulled.forward(ctx.call, ctx.operands, ctx.single, *full)

        _, pull = torch.func.vjp(again, *(given[i] for i in at))  # type: ignore[misc]
        grads = dict(zip(at, pull(cts), strict=True))
        return None, None, None, *(grads.get(i) for i in range(len(given)))


def _checked(target: Any, tensors: Sequence[torch.Tensor], grads: Any) -> list[torch.Tensor | None]:
    """The gradients as a list, one for each tensor operand, each like its operand."""
    given = list(grads) if isinstance(grads, (list, tuple)) else [grads]
    wrong = [
        f"number {i} is {_shown(g)}, and the operand is {_shown(x)}"
        for i, (g, x) in enumerate(zip(given, tensors, strict=False))
        if g is not None and not (isinstance(g, torch.Tensor) and g.shape == x.shape and g.dtype == x.dtype)
    ]
    if len(given) == len(tensors) and not wrong:
        return [g if x.is_floating_point() else None for g, x in zip(given, tensors, strict=True)]
    fail(
        RuleError,
        call=f"the vjp of the rule for {target}",
        got=f"gradients {', '.join(map(_shown, given))}",
        number="; ".join(wrong) or f"{len(given)} gradients for {len(tensors)} tensor operands",
        rule="a vjp gives one gradient for each tensor operand, of the operand's shape and dtype, or None for none",
        fix=f"return {', '.join(f'grad{i}' for i in range(len(tensors)))}, such as grad0 = grad0.to(x.dtype)",
    )


def _shown(x: Any) -> str:
    return repr(Type.whole(x)) if isinstance(x, torch.Tensor) else "None" if x is None else type(x).__name__


def call_operator(target: Any, args: Sequence[Any], kwargs: dict[str, Any], where: str = "") -> Any:
    """Calls an operator so that it can be differentiated: through the vjp of its rule, if that has one.

    Args:
        target: the operator.
        args: its arguments.
        kwargs: likewise.
        where: the user's line, for messages.

    Raises:
        RuleError: a gradient is asked of an operator that torch can't differentiate, and its rule has no vjp.
    """
    rule = RULES.get(target)
    vjp = rule.vjp if rule is not None else None
    if vjp is None:
        if getattr(target, "namespace", "aten") in _BUILT_IN:
            return target(*args, **kwargs)
        if any(torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), key) for key in _KEYS):
            return _by_autograd(target, args, kwargs, where)

        # Torch would give zeros in the place of the gradient, and no more than a warning.
        def vjp(*_: Any, **__: Any) -> NoReturn:
            _refuse(target, where, "no formula for its gradient is registered")

    return by_hand(target, vjp, args, kwargs)


def by_hand(fn: Callable[..., Any], vjp: Vjp, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> Any:
    """Calls a function whose cotangents are pulled back by another, given as for `rule`.

    Results that serve the backward alone have no cotangents of their own: such a function is differentiated once.
    """
    leaves, treedef = tree.flatten((_plain(args), kwargs or {}))
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    places = tuple(_Place() if isinstance(x, torch.Tensor) else x for x in leaves)
    return _Handwritten.apply(_Call(fn, vjp, places, treedef), *tensors)


def _plain(args: Any) -> Any:
    """Arguments of a graph's node without its own kinds of lists, which are leaves of a tree."""
    if isinstance(args, (list, tuple)):
        return (list if isinstance(args, list) else tuple)(_plain(a) for a in args)
    return args


def _by_autograd(target: Any, args: Sequence[Any], kwargs: dict[str, Any], where: str) -> Any:
    try:
        return target(*args, **kwargs)
    except (RuntimeError, NotImplementedError) as e:
        if not torch._C._are_functorch_transforms_active():
            raise
        unseen = "setup_context" in str(e)  # what torch.library registers has none
        why = "what torch.library has for its gradient is hidden from torch.func" if unseen else str(e).splitlines()[0]
        _refuse(target, where, why, e)


def _refuse(target: Any, where: str, why: str, cause: BaseException | None = None) -> NoReturn:
    name = target.name()
    try:
        fail(
            RuleError,
            call=f"the gradient of {name}" + (f" at {where}" if where else ""),
            got=f"{target._schema}",
            number=why,
            rule="gradients are taken by torch.func, which knows neither torch.library.register_autograd nor how to "
            "look into an operator",
            fix=f'ff.rule("{name}", pattern, vjp=fn) with fn(ct, result, *args) -> gradients of its tensor operands',
        )
    except RuleError as e:
        raise e from cause


class Handwritten(TorchFunctionMode):
    """Within it, operators of one's own are called as in a compiled function: by the vjp of their rule."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.OpOverloadPacket):
            names = func.overloads()
            name = (
                names[0] if len(names) == 1 else torch._C._jit_resolve_packet(func._qualified_op_name, *args, **kwargs)
            )
            func = getattr(func, name or "default")
        if isinstance(func, torch._ops.OpOverload):
            return call_operator(func, args, kwargs)
        return func(*args, **kwargs)
