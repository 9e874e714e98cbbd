"""Calls of `torch.autograd.Function`s, seen while a function is traced: a trace would lose their backward."""

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from torch.autograd.function import BackwardCFunction, _SingleLevelFunction
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils import checkpoint

from .errors import FeatherError, fail
from .source import this_line

#: What a call gives, from the class and its arguments.
Functions = Callable[[type, Any], Any]

OPERATOR = (
    '@torch.library.custom_op("mylib::{name}", mutates_args=()) above its forward, and register_fake for its shapes;\n'
    'ff.rule("mylib::{name}", "... -> ...", vjp=fn) with fn(ct, result, *args) -> gradients of its tensor operands'
)


def _refuse_function(cls: type) -> NoReturn:
    name = cls.__name__
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    fail(
        FeatherError,
        call=f"{name}.apply at {this_line()}",
        got=f"the torch.autograd.Function {cls.__module__}.{cls.__qualname__} in a transform or region that is traced",
        number="its backward would be lost: only the operators of its forward are recorded",
        rule="a trace holds operators, each with its own vjp; a handwritten backward has to belong to one",
        fix=OPERATOR.format(name=snake),
    )


_threads = threading.local()
_lock = threading.Lock()
_watching = 0


def _apply(cls: Any, *args: Any) -> Any:
    """In the place of `Function.apply` below its Python part, which is reached however `apply` was."""
    functions = getattr(_threads, "functions", None)
    if functions is None or get_proxy_mode() is None or _is_ours(cls):
        return super(_SingleLevelFunction, cls).apply(*args)
    if cls is checkpoint.CheckpointFunction:  # the identity; what is computed again is for `remat` to say
        return args[0](*args[2:])
    if cls.__module__ == checkpoint.__name__:
        return cls.forward(*args)
    return functions(cls, args)


def _is_ours(cls: type) -> bool:
    # A torch.func transform wraps each Function in one of its own, and calls the Function itself further down.
    ours = (__name__.partition(".")[0], "torch._functorch")
    return any((cls.__module__ + ".").startswith(name + ".") for name in ours)


def _begin(self: Any, *args: Any, **kwargs: Any) -> None:
    """In the place of BackwardCFunction.__init__: each call of a Function makes one, however `apply` was reached."""
    # Inside of an operator nothing is recorded, and it may do what it likes.
    watched = getattr(_threads, "depth", 0) and get_proxy_mode() is not None
    cls = self._forward_cls
    if watched and not _is_ours(cls):
        _refuse_function(cls)


@contextlib.contextmanager
def seen_functions(functions: Functions | None) -> Iterator[None]:
    """Gives each call of a torch.autograd.Function to `functions`; in a transform of torch.func it is refused."""
    global _watching
    before, _threads.functions = getattr(_threads, "functions", None), functions
    _threads.depth = getattr(_threads, "depth", 0) + 1
    with _lock:
        _watching += 1
        BackwardCFunction.__init__ = _begin  # type: ignore[method-assign]
        _SingleLevelFunction.apply = classmethod(_apply)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        _threads.depth -= 1
        _threads.functions = before
        with _lock:
            _watching -= 1
            if not _watching:
                del BackwardCFunction.__init__
                del _SingleLevelFunction.apply  # type: ignore[attr-defined]
