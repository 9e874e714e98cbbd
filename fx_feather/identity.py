"""Identity: a key for functions and values, equal for those that trace alike."""

import functools as ft
import types
from collections.abc import Iterable
from typing import Any

import torch

#: Objects within objects that are looked into; what lies deeper is told apart by identity alone.
_DEPTH = 8
#: The same for what a function reads from its module.
_SHALLOW = 2
#: Packages whose functions do not change between calls.
_FIXED = ("builtins", "einops", "fx_feather", "numpy", "optree", "torch")


def identity(fn: Any, kept: list[Any], within: tuple[int, ...] = ()) -> Any:
    """A key that is equal for functions and values that trace alike.

    Args:
        fn: a function, by its code, what it closes over and the numbers, words and tensors that it reads from its
            module; a container or an object that may change, by what it holds now; anything else by its value.
        kept: takes in what is named by identity alone, so that no new object takes its place.
        within: identities of what holds `fn`.

    >>> def times(k):
    ...     return lambda x: x * k
    >>> identity(times(2), []) == identity(times(2), []), identity(times(2), []) == identity(times(2.0), [])
    (True, False)
    """
    if id(fn) in within:
        return ("itself", within.index(id(fn)))  # as a recursive function closes over itself

    def keys(parts: Iterable[Any]) -> tuple[Any, ...]:
        return tuple(identity(p, kept, (*within, id(fn))) for p in parts)

    if isinstance(fn, ft.partial):
        parts = [fn.func, *fn.args, *(v for _, v in sorted(fn.keywords.items()))]
        return ("partial", tuple(sorted(fn.keywords)), *keys(parts))
    if isinstance(fn, types.FunctionType):
        cells = keys(c.cell_contents for c in fn.__closure__ or ())
        defaults = (fn.__defaults__ or (), fn.__kwdefaults__ or {})
        kept.append(fn.__globals__)
        # What its module holds is looked into less deeply: a function sees all of it, and reads little.
        shallow = (*within, id(fn), *(0,) * (_DEPTH - _SHALLOW - 1))
        read = tuple(identity(x, kept, shallow) for x in _read(fn))
        return ("function", fn.__code__, id(fn.__globals__), read, cells, *keys(defaults))
    if isinstance(fn, types.MethodType):
        return ("method", *keys((fn.__func__, fn.__self__)))
    # Containers and objects by what they hold now: a function may see another content at its next call.
    if isinstance(fn, tuple | list):
        return (type(fn), *keys(fn))
    if isinstance(fn, dict):
        return (type(fn), keys(fn), keys(fn.values()))
    if isinstance(fn, set):
        return (type(fn), frozenset(fn))
    if _may_change(fn) and len(within) < _DEPTH:
        kept.append(fn)
        return ("object", id(fn), tuple(vars(fn)), keys(vars(fn).values()))
    # 0.0 and -0.0 are equal, and NaN is not equal to itself.
    if type(fn) is float:
        return (float, fn.hex())
    try:
        hash(fn)
    except TypeError:
        kept.append(fn)
        return ("id", id(fn))
    # 1, 1.0 and True are equal, yet they trace differently.
    return (type(fn), fn)


def _read(fn: types.FunctionType) -> list[Any]:
    """What a function and those defined in it read from their module, but for modules, classes and libraries."""
    codes: list[types.CodeType] = [fn.__code__]
    found: dict[str, Any] = {}
    for code in codes:
        codes += [c for c in code.co_consts if isinstance(c, types.CodeType)]
        found |= {name: fn.__globals__[name] for name in code.co_names if name in fn.__globals__}
    fixed = (type, types.ModuleType, types.BuiltinFunctionType)
    return [x for x in found.values() if not isinstance(x, fixed) and not _is_fixed(x)]


def _is_fixed(x: Any) -> bool:
    return isinstance(x, types.FunctionType) and (x.__module__ or "").partition(".")[0] in _FIXED


def _may_change(x: Any) -> bool:
    """Whether an object has attributes that its hash, if it has one, doesn't speak of."""
    by: Any = type(x).__hash__
    return (
        by in (None, object.__hash__)
        and hasattr(x, "__dict__")
        and not isinstance(x, type | types.ModuleType | torch.Tensor)
    )
