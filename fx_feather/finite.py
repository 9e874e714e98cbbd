"""Values that are not finite: what an update reads is looked at before the update, and what is wrong is named."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .errors import NonFiniteError, fail


def flags(values: Sequence[Any]) -> list[Any]:
    """For each value whether something in it is not finite, as a 0-dim tensor; for a list of ranks' values, a list."""
    return [[_flag(x) for x in v] if isinstance(v, list) else _flag(v) for v in values]


def _flag(x: torch.Tensor) -> torch.Tensor:
    return ~x.isfinite().all()


def is_moderate(numbers: Sequence[float], dtype: torch.dtype) -> bool:
    """Whether products of any two of some numbers are finite in a dtype.

    >>> is_moderate([1e10, 3.0], torch.float32), is_moderate([1e20], torch.float32)
    (True, False)
    """
    return all(abs(x) < math.sqrt(torch.finfo(dtype).max) for x in numbers)


def check_numbers(step: int, numbers: Mapping[str, float], dtype: torch.dtype) -> None:
    """Raises NonFiniteError for numbers that an update reads, by name, and that are not finite in its dtype."""
    bad = {k: x for k, x in numbers.items() if not abs(x) <= torch.finfo(dtype).max}
    if bad:
        named = ", ".join(f"{k} is {x:g}" for k, x in bad.items())
        over = all(math.isfinite(x) for x in bad.values())
        fail(
            NonFiniteError,
            call=f"step {step}",
            got=", ".join(f"{k} {x:g}" for k, x in numbers.items()),
            number=f"{named}, which is more than {dtype} holds" if over else named,
            rule="an update by a number that is not finite would spoil every parameter; it was not applied",
            fix=f"the state is unchanged: mend the schedule or setting, which gives this after {step} updates",
        )


def refuse_gradients(step: int, loss: float, norm: float, count: float, bad: Sequence[str]) -> None:
    """Raises NonFiniteError for a loss or norm that is not finite; `bad` are the leaves with such gradients."""
    others = "the loss" if not math.isfinite(loss) else "the norm of all, which is too large for its dtype"
    number = f"first leaf with a gradient that is not finite: {_first(bad) or f'no gradient: only {others}'}"
    if count <= 0:
        what = "no element of the batch counts towards the loss" if count == 0 else "it can't normalise a sum"
        number = f"the count is {count}: {what}; {number}"
    fail(
        NonFiniteError,
        call=f"step {step}",
        got=f"loss {loss}, gradient norm {norm}, count {count}",
        number=number,
        rule="a step with a loss or gradient that is not finite would spoil every parameter; it was not applied",
        fix="the state is unchanged: skip this batch, lower the learning rate, or look at the leaf above, or for "
        "an index that is outside of a split dim, such as a token of another vocabulary",
    )


def refuse_values(step: int, loss: float, what: str, bad: Sequence[str], fix: str) -> None:
    """Raises NonFiniteError where some leaves are not finite; does nothing where there are none."""
    if bad:
        fail(
            NonFiniteError,
            call=f"step {step}",
            got=f"loss {loss}, gradients that are finite",
            number=f"first {what} that is not finite: {_first(bad)}",
            rule="a value that is not finite would spread to every parameter; the update was not applied",
            fix=f"the state is unchanged: {fix}",
        )


def refuse_state(call: str, bad: Sequence[str]) -> None:
    """Raises NonFiniteError for leaves of a state that are not finite before anything was computed with them."""
    if bad:
        fail(
            NonFiniteError,
            call=call,
            got="a state that was brought here",
            number=f"first leaf that is not finite: {_first(bad)}",
            rule="a value that is not finite would spread to every parameter",
            fix="look at where the state comes from: a file, or what changed it since the last step",
        )


def _first(paths: Sequence[str]) -> str:
    return paths[0] + (f" (and {len(paths) - 1} more)" if len(paths) > 1 else "") if paths else ""
