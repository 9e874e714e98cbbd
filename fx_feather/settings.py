"""Checks of the settings that a user makes: every one that is out of its range is named in one error."""

import dataclasses
import difflib
import functools as ft
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from .errors import FeatherError, OptionError, message, raise_all

Check = tuple[str, bool | Callable[[Any], bool], str, str]
"""The setting's name, whether it is fine or a function that says so, the rule for it, and the edit that mends it."""

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


def check(error: type[FeatherError], name: str, settings: Mapping[str, Any], checks: Sequence[Check]) -> None:
    """Raises one `error` that lists the settings of the call `name(...)` that are not fine.

    Where a check is a function, the fix keeps what was meant: `accumulate='4'` is mended by `accumulate=4`.
    """
    raise_all(
        error,
        [
            message(
                call=text(name, settings),
                got=f"{key}={settings[key]!r}",
                number=f"{key} is {settings[key]!r}",
                rule=rule,
                fix=meant(key, settings[key], fine) or fix if callable(fine) else fix,
            )
            for key, fine, rule, fix in checks
            if not (fine(settings[key]) if callable(fine) else fine)
        ],
    )


@dataclasses.dataclass(frozen=True)
class OneOf:
    """Whether a setting is one of some words, or an integer of at least `numbers`, or None where `none` allows it.

    >>> OneOf(("eager", "inductor"))("eager")
    True
    """

    words: tuple[str, ...]
    numbers: int | None = None
    none: bool = False

    def __call__(self, x: Any) -> bool:
        if x is None:
            return self.none
        return x in self.words if isinstance(x, str) else self.numbers is not None and is_count(x, self.numbers)


def count(least: int, none: bool = False) -> OneOf:
    """Whether a setting is an integer of at least `least`."""
    return OneOf((), least, none)


def meant(key: str, value: Any, fine: Callable[[Any], bool]) -> str | None:
    """The setting that was probably meant by one that is not fine, as it would be written; None if there is none.

    >>> meant("accumulate", "4", lambda x: is_count(x, 1))
    'accumulate=4'
    >>> meant("backend", "Induktor", OneOf(("eager", "inductor")))
    "backend='inductor'"
    """
    return next((f"{key}={x!r}" for x in _readings(value, fine) if fine(x)), None)


def _readings(value: Any, fine: Callable[[Any], bool]) -> Iterator[Any]:
    """What a value may stand for: the number that a string spells, a whole number as an int, the nearest word."""
    if isinstance(value, str):
        words = fine.words if isinstance(fine, OneOf) else ()
        yield from difflib.get_close_matches(value.lower().strip(), words, n=1)
        for kind in (int, float):
            try:
                yield kind(value)
            except ValueError:
                continue
    elif isinstance(value, float) and value.is_integer():
        yield int(value)
    elif getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None)):
        yield value.item()  # a number of numpy or torch


def known_options(fn: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """Decorates a function whose keyword arguments are options: one that it doesn't have is an OptionError."""
    known = [p.name for p in inspect.signature(fn).parameters.values() if p.kind is p.KEYWORD_ONLY]

    @ft.wraps(fn)
    def checked(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        raise_all(
            OptionError,
            [
                message(
                    call=f"{fn.__name__}(..., {key}={kwargs[key]!r:.60})",
                    got=f"the option {key}",
                    number=f"{key!r} is not an option of {fn.__name__}",
                    rule=f"the options are {', '.join(known)}",
                    fix=_renamed(key, kwargs[key], known),
                )
                for key in kwargs
                if key not in signature.parameters
            ],
        )
        return fn(*args, **kwargs)

    signature = inspect.signature(fn)
    return checked


def _renamed(key: str, value: Any, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1)
    return f"{close[0]}={value!r:.60}" if close else "leave it out"


def text(name: str, settings: Mapping[str, Any]) -> str:
    """A call as it would be written.

    >>> text("adamw", {"lr": 0.1, "b1": 0.9})
    'adamw(lr=0.1, b1=0.9)'
    """
    return f"{name}({', '.join(f'{k}={v!r}' for k, v in settings.items())})"


def is_finite(x: Any, *, above: float = -math.inf, least: float = -math.inf) -> bool:
    """Whether `x` is a finite number (no bool, no tensor), greater than `above` and at least `least`."""
    return isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x) and x > above and x >= least


def is_count(x: Any, least: int) -> bool:
    """Whether `x` is an integer of at least `least`."""
    return isinstance(x, int) and not isinstance(x, bool) and x >= least
