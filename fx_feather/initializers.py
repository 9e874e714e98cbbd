"""Initialisers: rules for the initial values of a parameter, as values that print as the call that made them."""

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from .errors import FeatherError
from .settings import check, is_finite


@runtime_checkable
class Initializer(Protocol):
    """A rule for initial values: anything with this method, ideally a frozen dataclass."""

    def block(self, generator: torch.Generator, n: int, dtype: torch.dtype) -> Tensor:
        """`n` values as a 1-D CPU tensor: a function of the generator's state and `n` alone."""
        ...


# The classes have lower-case names, since they are values that print as the call that made them.
#
# Random values are drawn in float32 whatever the parameter's dtype, then cast: a bfloat16 or float64 parameter starts
# at the values of its float32 twin, so that runs in two precisions can be compared.


@dataclass(frozen=True)
class normal:
    """Normal values of mean 0.

    Raises:
        FeatherError: a standard deviation that is not positive and finite.

    >>> normal(0.02)
    normal(std=0.02)
    """

    std: float

    def __post_init__(self) -> None:
        fine = is_finite(self.std, above=0)
        checks = [("std", fine, "std is positive and finite", "normal(0.02), or zeros()")]
        check(FeatherError, "normal", vars(self), checks)

    def block(self, generator: torch.Generator, n: int, dtype: torch.dtype) -> Tensor:
        """`n` values; see `Initializer.block`."""
        return torch.empty(n, dtype=torch.float32, device="cpu").normal_(0.0, self.std, generator=generator).to(dtype)


@dataclass(frozen=True)
class truncated_normal:
    """Normal values of mean 0, redrawn beyond `cut` standard deviations (of the normal before the cut).

    Raises:
        FeatherError: a standard deviation or cut that is not positive and finite.

    >>> truncated_normal(0.02)
    truncated_normal(std=0.02, cut=3.0)
    """

    std: float
    cut: float = 3.0

    def __post_init__(self) -> None:
        checks = [
            ("std", is_finite(self.std, above=0), "std is positive and finite", "truncated_normal(0.02), or zeros()"),
            ("cut", is_finite(self.cut, above=0), "cut is positive and finite", "cut=3.0, or normal(std) for no cut"),
        ]
        check(FeatherError, "truncated_normal", vars(self), checks)

    def block(self, generator: torch.Generator, n: int, dtype: torch.dtype) -> Tensor:
        """`n` values; see `Initializer.block`."""
        # By the inverse of the distribution function, not by redrawing: the number of draws must not depend on values.
        edge = math.erf(self.cut / math.sqrt(2.0))
        u = torch.empty(n, dtype=torch.float32, device="cpu").uniform_(-edge, edge, generator=generator)
        bound = self.cut * self.std
        return u.erfinv_().mul_(self.std * math.sqrt(2.0)).clamp_(-bound, bound).to(dtype)


@dataclass(frozen=True)
class uniform:
    """Uniform values from `low` to `high`.

    Raises:
        FeatherError: bounds that are not finite, or not in order.

    >>> uniform(-0.1, 0.1)
    uniform(low=-0.1, high=0.1)
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        finite = is_finite(self.low) and is_finite(self.high)
        fine = finite and self.low < self.high
        checks = [("low", fine, "low and high are finite and low < high", "uniform(-0.1, 0.1)")]
        check(FeatherError, "uniform", vars(self), checks)

    def block(self, generator: torch.Generator, n: int, dtype: torch.dtype) -> Tensor:
        """`n` values; see `Initializer.block`."""
        values = torch.empty(n, dtype=torch.float32, device="cpu")
        return values.uniform_(self.low, self.high, generator=generator).to(dtype)


@dataclass(frozen=True)
class zeros:
    """Zeros.

    >>> zeros()
    zeros()
    """

    def block(self, generator: torch.Generator, n: int, dtype: torch.dtype) -> Tensor:
        """`n` values; see `Initializer.block`."""
        return torch.zeros(n, dtype=dtype, device="cpu")


@dataclass(frozen=True)
class ones:
    """Ones.

    >>> ones()
    ones()
    """

    def block(self, generator: torch.Generator, n: int, dtype: torch.dtype) -> Tensor:
        """`n` values; see `Initializer.block`."""
        return torch.ones(n, dtype=dtype, device="cpu")


@dataclass(frozen=True, eq=False)
class given:
    """Values that are there already, such as those of a module or a file.

    >>> given(torch.zeros(3, 4))
    given(float32, (3, 4))
    """

    values: Tensor

    def __repr__(self) -> str:
        return f"given({str(self.values.dtype).removeprefix('torch.')}, {tuple(self.values.shape)})"

    def block(self, generator: torch.Generator, n: int, dtype: torch.dtype) -> Tensor:
        """All values, if there are `n`; a part of more is taken by its place, see `at`."""
        return self.at(0, n, dtype)

    def at(self, start: int, n: int, dtype: torch.dtype) -> Tensor:
        """`n` values from a place in row-major order on."""
        return self.values.detach().reshape(-1)[start : start + n].to(device="cpu", dtype=dtype, copy=True)
