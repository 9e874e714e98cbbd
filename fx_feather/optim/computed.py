"""Schedules that Python computes: any function of the step, with branches and Python numbers, run at each step."""

import math
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from fx_feather import kernels
from fx_feather.errors import OptimizerError, fail
from fx_feather.trace import block

#: Rates reach leaves in float32 or wider.
LARGEST = torch.finfo(torch.float32).max


class Computed:
    """A schedule from a function of the step: it is called with a Python int, outside of the compiled program.

    It may branch on the step and use `math`, tables, or what it finds in Python at that moment; a function that takes
    only tensors gets an int64 tensor. On a CUDA device each call waits for the step, as schedules of this package do
    not. Every rank calls it, and must get the same.

    Args:
        fn: from the number of updates done (0 at the first) to a number, or a tensor without dims.
        call: who asks, for messages.
        least: the smallest value that is fine.

    Raises:
        OptimizerError: a function that fails at step 0; at a step, before anything is updated, a value that is not
            finite, overflows float32, or is below `least`.

    >>> rate = Computed(lambda step: 0.1 if step < 2 else 0.1 * math.cos(step), "adamw")
    >>> rate(torch.tensor(1))
    tensor(0.1000, dtype=torch.float64)
    """

    def __init__(self, fn: Callable[[Any], Any], call: str, least: float = -math.inf):
        self.fn, self.call, self.least = fn, call, least
        self.takes: Callable[[int], Any] = int
        first = self._first()
        self.name = kernels.named(f"{call}: {self._written()} from {first!r}", self.value, fn)
        self._block = block(self._operator, name="schedule")

    def __call__(self, step: Tensor | int) -> Tensor:
        """The value at a step, float64[]."""
        out: Tensor = self._block(step if isinstance(step, Tensor) else torch.tensor(step))
        return out

    def _operator(self, step: Tensor) -> Tensor:
        return torch.ops.fx_feather.scheduled(step, self.name)

    def _first(self) -> float:
        try:
            return self.value(0)
        except (TypeError, AttributeError):
            self.takes = torch.tensor
        try:
            return self.value(0)
        except OptimizerError:
            raise
        except Exception as e:
            self._fail(f"it raises {type(e).__name__}: {e}", 0, f"step 0, as an int and as a tensor: {e}")

    def value(self, step: int) -> float:
        """The value at a step, checked."""
        with torch.no_grad():
            found = self.fn(self.takes(step))
        if isinstance(found, Tensor) and found.ndim:
            self._fail(f"a tensor of shape {list(found.shape)}", step, f"{found.ndim} dims at step {step}")
        number = float(found)
        if not (math.isfinite(number) and self.least <= number and abs(number) <= LARGEST):
            self._fail(repr(number), step, f"{number!r} at step {step}")
        return number

    def _fail(self, got: str, step: int, number: str) -> NoReturn:
        least = "" if self.least == -math.inf else f", not below {self.least:g},"
        fail(
            OptimizerError,
            call=f"{self.call}, whose schedule is {self._written()}",
            got=got,
            number=number,
            rule=f"a schedule gives a finite number{least} of the size of a float32 for the number of updates done; "
            "nothing was updated",
            fix="mend the function at this step, such as `lambda step: 0.1 / (step + 1)`",
        )

    def _written(self) -> str:
        code = getattr(self.fn, "__code__", None)
        name = getattr(self.fn, "__qualname__", type(self.fn).__qualname__)
        return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code is not None else name

    def __repr__(self) -> str:
        return getattr(self.fn, "__qualname__", type(self.fn).__qualname__)
