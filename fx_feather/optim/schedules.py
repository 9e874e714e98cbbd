"""Learning-rate schedules: pure functions of the step, as values that print as the call that made them."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fx_feather.errors import OptimizerError
from fx_feather.settings import check, is_count, is_finite, text

from .computed import LARGEST, Computed


@dataclass(frozen=True, repr=False)
class Schedule:
    """A function from the number of updates done so far (0 at the first) to a 0-dim float64 tensor.

    It has no branch on the value of the step, so that it can be traced. Any function of the step can stand in for one:
    it is called with a Python int at each step, outside of the program.

    >>> schedule = linear(1.0, 0.0, steps=4)
    >>> schedule
    linear(init=1.0, end=0.0, steps=4)
    >>> schedule(1)
    tensor(0.7500, dtype=torch.float64)
    """

    text: str
    rule: Callable[[Tensor], Tensor]

    def __call__(self, step: Tensor | int) -> Tensor:
        """The value at a step."""
        at = step if isinstance(step, Tensor) else torch.tensor(step)
        return self.rule(at.to(torch.float64))

    def __repr__(self) -> str:
        return self.text


def constant(value: float) -> Schedule:
    """The same value at every step.

    >>> constant(0.5)(7)
    tensor(0.5000, dtype=torch.float64)
    """
    return _schedule("constant", {"value": value}, lambda t: torch.full_like(t, value))


def linear(init: float, end: float, steps: int) -> Schedule:
    """From `init` at step 0 in a straight line to `end` at step `steps`, and `end` from then on.

    >>> linear(0.0, 1.0, steps=2)(1)
    tensor(0.5000, dtype=torch.float64)
    """
    return _schedule("linear", {"init": init, "end": end, "steps": steps}, _line(init, end, steps))


def cosine(init: float, steps: int, end: float = 0.0) -> Schedule:
    """From `init` at step 0 along half a cosine to `end` at step `steps`, and `end` from then on.

    Source: Loshchilov and Hutter, SGDR, equation 5.

    >>> cosine(1.0, steps=2)(1)
    tensor(0.5000, dtype=torch.float64)
    """
    return _schedule("cosine", {"init": init, "steps": steps, "end": end}, _half_cosine(init, end, steps))


def warmup_linear(peak: float, warmup_steps: int, total_steps: int, end: float = 0.0) -> Schedule:
    """In a line to `peak` at step `warmup_steps`, then in a line to `end` at step `total_steps`.

    The first step has the rate `peak / (warmup_steps + 1)`: an update by a rate of 0 would be a step for nothing.

    Raises:
        OptimizerError: a warm-up longer than the whole, or values that are negative or not finite.

    >>> [float(warmup_linear(1.0, 3, 5)(step)) for step in range(6)]
    [0.25, 0.5, 0.75, 1.0, 0.5, 0.0]
    """
    settings = {"peak": peak, "warmup_steps": warmup_steps, "total_steps": total_steps, "end": end}
    return _warmed("warmup_linear", settings, _line)


def warmup_cosine(peak: float, warmup_steps: int, total_steps: int, end: float = 0.0) -> Schedule:
    """In a line to `peak` at step `warmup_steps`, then along half a cosine to `end` at step `total_steps`.

    The first step has the rate `peak / (warmup_steps + 1)`: an update by a rate of 0 would be a step for nothing.

    Raises:
        OptimizerError: a warm-up longer than the whole, or values that are negative or not finite.

    >>> [round(float(warmup_cosine(1.0, 3, 5)(step)), 6) for step in range(6)]
    [0.25, 0.5, 0.75, 1.0, 0.5, 0.0]
    """
    settings = {"peak": peak, "warmup_steps": warmup_steps, "total_steps": total_steps, "end": end}
    return _warmed("warmup_cosine", settings, _half_cosine)


def wsd(peak: float, warmup: int, stable: int, decay: int, end: float = 0.0) -> Schedule:
    """Warm-up, stable, decay: `warmup` steps up to `peak`, `stable` steps at it, `decay` steps in a line to `end`.

    The first step has the rate `peak / (warmup + 1)`.

    Source: Hu et al., MiniCPM, section 4, with a linear decay.

    Raises:
        OptimizerError: a decay of no steps, or values that are negative or not finite.

    >>> [float(wsd(1.0, 3, 2, 2)(step)) for step in range(8)]
    [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 0.5, 0.0]
    """
    settings = {"peak": peak, "warmup": warmup, "stable": stable, "decay": decay, "end": end}
    counts = [("warmup", 0), ("stable", 0), ("decay", 1)]
    # Validated before the pieces are made: their lengths are sums of the counts.
    _check("wsd", settings, counts)
    tail = _joined(lambda t: torch.full_like(t, peak), _line(peak, end, decay), stable)
    return Schedule(text("wsd", settings), _joined(_warmup(peak, warmup), tail, warmup))


def as_schedule(lr: Any, call: str, least: float = 0) -> Callable[[Tensor], Tensor]:
    """A number becomes a constant schedule, a schedule stays as it is, and Python computes any other function."""
    if isinstance(lr, Schedule):
        return lr
    return Computed(lr, f"{call}(...)", least) if callable(lr) else constant(float(lr))


def shown(lr: Any, schedule: Callable[[Tensor], Tensor]) -> Any:
    """A rate as it prints: a function of Python by its name, all else as it was given."""
    return schedule if isinstance(schedule, Computed) else lr


Rule = Callable[[Tensor], Tensor]


def _line(init: float, end: float, steps: int) -> Rule:
    return lambda t: init + (end - init) * _progress(t, steps)


def _warmup(peak: float, steps: int) -> Rule:
    return _line(peak / (steps + 1), peak, steps)


def _half_cosine(init: float, end: float, steps: int) -> Rule:
    return lambda t: end + (init - end) * (0.5 + 0.5 * torch.cos(math.pi * _progress(t, steps)))


def _progress(t: Tensor, steps: int) -> Tensor:
    return (t / max(steps, 1)).clamp(0.0, 1.0)


def _joined(first: Rule, second: Rule, boundary: int) -> Rule:
    """`first` before the boundary, from there on `second`, which counts from 0 again."""
    if boundary == 0:
        return second
    return lambda t: torch.where(t < boundary, first(t), second(t - boundary))


def _warmed(name: str, settings: dict[str, Any], after: Callable[[float, float, int], Rule]) -> Schedule:
    _check(name, settings, [("warmup_steps", 0), ("total_steps", 1)])
    peak, warmup, total, end = settings.values()
    rule = _joined(_warmup(peak, warmup), after(peak, end, total - warmup), warmup)
    return Schedule(text(name, settings), rule)


def _schedule(name: str, settings: dict[str, Any], rule: Rule) -> Schedule:
    _check(name, settings, [("steps", 1)] if "steps" in settings else [])
    return Schedule(text(name, settings), rule)


def _check(name: str, settings: dict[str, Any], counts: list[tuple[str, int]]) -> None:
    """Raises OptimizerError for all settings that are impossible: counts have a least value, all else is a value."""
    least = dict(counts)
    checks = [
        (key, is_count(x, least[key]), f"{key} is an integer of at least {least[key]}", f"{key}={max(1, least[key])}")
        if key in least
        else (
            key,
            is_finite(x, least=0) and x <= LARGEST,
            "a value of a schedule is finite and not negative",
            f"{key}=1e-3",
        )
        for key, x in settings.items()
    ]
    check(OptimizerError, name, settings, checks)
    if "total_steps" in settings:
        warmup, total = settings["warmup_steps"], settings["total_steps"]
        rule = f"the warm-up is a part of the whole schedule, but warmup_steps {warmup} > total_steps {total}"
        fix = f"warmup_steps={max(1, total // 20)}"
        check(OptimizerError, name, settings, [("warmup_steps", warmup <= total, rule, fix)])
