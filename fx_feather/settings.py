"""Checks of the numbers that a user sets: every setting out of its range is named in one error."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .errors import FeatherError, message, raise_all

Check = tuple[str, bool, str, str]
"""The setting's name, whether it is fine, the rule for it, and the edit that mends it."""


def check(error: type[FeatherError], name: str, settings: Mapping[str, Any], checks: Sequence[Check]) -> None:
    """Raises one `error` that lists the settings of the call `name(...)` that are not fine."""
    raise_all(
        error,
        [
            message(
                call=text(name, settings),
                got=f"{key}={settings[key]!r}",
                number=f"{key} is {settings[key]!r}",
                rule=rule,
                fix=fix,
            )
            for key, fine, rule, fix in checks
            if not fine
        ],
    )


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
