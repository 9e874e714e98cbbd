"""Identity: a key for functions and values, equal for those that trace alike."""

import functools as ft
import types
from collections.abc import Iterable
from typing import Any


def identity(fn: Any, kept: list[Any], within: tuple[int, ...] = ()) -> Any:
    """A key that is equal for functions and values that trace alike.

    Args:
        fn: a function, by its code and what it closes over; a container, by what it holds; anything else by its value.
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
        return ("function", fn.__code__, id(fn.__globals__), cells, *keys(defaults))
    # Containers by what they hold now: a function may see another content at its next call.
    if isinstance(fn, tuple | list):
        return (type(fn), *keys(fn))
    if isinstance(fn, dict):
        return (type(fn), keys(fn), keys(fn.values()))
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
