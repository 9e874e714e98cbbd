"""Frequencies of rotary positions beyond the length that a model was trained on: one value a method."""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fx_feather.errors import ShapeError, message, raise_all

# The classes are values that print as the call that made them. Each formula is written in the order in which the
# released models were evaluated, since at position 30000 one bit of a frequency is 0.002 of an angle.


class Scaling(Protocol):
    """How the frequencies `w_j = theta^(-2j / dim)` are changed for longer texts.

    A score depends on relative positions alone whatever the frequencies are, so each method is a choice of frequencies,
    and of one factor on all queries and keys.
    """

    @property
    def factor_on_heads(self) -> float:
        """Multiplies cosines and sines, so that each of query and key is longer by it and scores by its square."""
        ...

    def frequencies(self, theta: float, dim: int, dtype: torch.dtype, length: Tensor) -> Tensor:
        """The `[dim / 2]` frequencies.

        Args:
            theta: base of the wavelengths.
            dim: how many features of a head are turned.
            dtype: dtype of the result.
            length: a scalar, one more than the largest position.
        """
        ...


def plain(theta: float | Tensor, dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`theta^(-2j / dim)`, see `fx_feather.nn.rope.tables`.

    >>> plain(100.0, 4, torch.float32, torch.device("cpu"))
    tensor([1.0000, 0.1000])
    """
    steps = torch.arange(0, dim, 2, dtype=dtype, device=device)
    return 1.0 / (theta ** (steps / dim))


def _check(name: str, settings: dict[str, float | None], *rules: tuple[str, bool, str, str]) -> None:
    call = f"{name}({', '.join(f'{k}={v!r}' for k, v in settings.items())})"
    raise_all(
        ShapeError,
        [
            message(call=call, got=f"{key}={settings[key]!r}", number=f"{key} is {settings[key]!r}", rule=rule, fix=fix)
            for key, fine, rule, fix in rules
            if not fine
        ],
    )


def _positive(x: object) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and 0 < x < math.inf


@dataclass(frozen=True, kw_only=True)
class Linear:
    """Position interpolation: positions are divided by `factor`, so that a longer text lies in the trained range.

    The angle at position `m` is `(m / factor) w = m (w / factor)`: the frequencies are divided.

    Source: Chen et al., Extending Context Window via Positional Interpolation, 2023, eq. 4.

    >>> Linear(factor=4.0).frequencies(100.0, 4, torch.float32, torch.tensor(1))
    tensor([0.2500, 0.0250])
    """

    factor: float
    factor_on_heads = 1.0

    def __post_init__(self) -> None:
        _check("Linear", vars(self), ("factor", _positive(self.factor), "a factor is positive", "factor=4.0"))

    def frequencies(self, theta: float, dim: int, dtype: torch.dtype, length: Tensor) -> Tensor:
        """The `[dim / 2]` frequencies; see `Scaling`."""
        return plain(theta, dim, dtype, length.device) / self.factor


@dataclass(frozen=True, kw_only=True)
class Dynamic:
    """Dynamic NTK: the base grows with the text, once it is longer than the `trained` length.

    With `s = factor L / trained - (factor - 1)` for a length `L`, the base becomes `theta s^(dim / (dim - 2))`. The
    last frequency `theta^(-(dim - 2) / dim)` is then divided by exactly `s`, as interpolation would do, and the first
    is kept: far distances are interpolated, near ones are not. Up to the trained length nothing changes.

    The length is that of the longest text in the batch, so that one table serves all.

    Source: bloc97 and emozilla, NTK-aware and dynamically scaled RoPE, 2023; Peng et al., YaRN, 2023, section 3.1 and
    appendix B.1.

    >>> Dynamic(factor=2.0, trained=8).frequencies(100.0, 4, torch.float32, torch.tensor(16))
    tensor([1.0000, 0.0333])
    """

    factor: float
    trained: int
    factor_on_heads = 1.0

    def __post_init__(self) -> None:
        _check(
            "Dynamic",
            vars(self),
            ("factor", _positive(self.factor) and self.factor >= 1, "a factor is at least 1", "factor=2.0"),
            ("trained", _positive(self.trained), "the trained length is positive", "trained=4096"),
        )

    def frequencies(self, theta: float, dim: int, dtype: torch.dtype, length: Tensor) -> Tensor:
        """The `[dim / 2]` frequencies; see `Scaling`."""
        longest = length.clamp(min=self.trained).to(dtype)
        grown = (self.factor * longest / self.trained - (self.factor - 1)) ** (dim / (dim - 2))
        return plain(theta * grown, dim, dtype, length.device)


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """YaRN: each frequency is interpolated, kept, or blended, by how often it turns within the trained length.

    A pair of features with frequency `w` turns `r = trained w / 2 pi` times within the trained length. Where it turns
    more than `beta_fast` times, only near distances tell one angle from another, so the frequency is kept; where
    fewer than `beta_slow` times, far positions were never seen, so it is divided by `factor`. Solved for the index,
    `j(r) = dim log(trained / 2 pi r) / (2 log theta)`, and between the two indices the blend is linear in `j`;
    `truncate` rounds them outwards to whole indices.

    With more tokens to choose from, scores are sharpened: queries and keys are longer by `attention_factor`, by
    default `0.1 log(factor) + 1`. DeepSeek's models set `mscale` and `mscale_all_dim`, and take the quotient of
    `0.1 mscale log(factor) + 1` for the two; the second is also squared into the scale of their scores, which covers
    the features that are not turned (`score_factor`).

    Args:
        factor: how many times longer than trained.
        trained: the length that the model was trained on.
        beta_fast, beta_slow: numbers of turns between which frequencies are blended.
        mscale, mscale_all_dim: see above, in use where both are given and not 0.
        attention_factor: in place of what these give.
        truncate: blend between whole indices.

    Source: Peng et al., YaRN, 2023, eq. 17 to 23; DeepSeek-V2, 2024, section 3.1.4.

    >>> Yarn(factor=4.0, trained=64).factor_on_heads
    1.138629436111989
    """

    factor: float
    trained: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        order = _positive(self.beta_slow) and _positive(self.beta_fast) and self.beta_slow <= self.beta_fast
        _check(
            "Yarn",
            vars(self),
            ("factor", _positive(self.factor), "a factor is positive", "factor=4.0"),
            ("trained", _positive(self.trained), "the trained length is positive", "trained=4096"),
            ("beta_fast", order, "beta_fast is at least beta_slow, both positive", "beta_fast=32.0, beta_slow=1.0"),
        )

    @property
    def factor_on_heads(self) -> float:
        """Multiplies cosines and sines."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return _sharpened(self.factor, self.mscale) / _sharpened(self.factor, self.mscale_all_dim)
        return _sharpened(self.factor, 1.0)

    @property
    def score_factor(self) -> float:
        """What DeepSeek's models multiply all scores by: the square of `0.1 mscale_all_dim log(factor) + 1`."""
        return _sharpened(self.factor, self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def frequencies(self, theta: float, dim: int, dtype: torch.dtype, length: Tensor) -> Tensor:
        """The `[dim / 2]` frequencies; see `Scaling`."""
        kept = plain(theta, dim, dtype, length.device)
        steps = torch.arange(0, dim, 2, dtype=dtype, device=length.device)
        divided = 1.0 / (self.factor * theta ** (steps / dim))
        low, high = (self._index(theta, dim, turns) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        if low == high:
            high += 0.001
        ramp = ((torch.arange(dim // 2, dtype=dtype, device=length.device) - low) / (high - low)).clamp(0, 1)
        whole = 1 - ramp
        return divided * (1 - whole) + kept * whole

    def _index(self, theta: float, dim: int, turns: float) -> float:
        """The index of the pair of features that turns this often within the trained length."""
        return dim * math.log(self.trained / (turns * 2 * math.pi)) / (2 * math.log(theta))


def _sharpened(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True, kw_only=True)
class Llama3:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between blended.

    A pair of features with frequency `w` turns `r = trained w / 2 pi` times within the trained length. Where `r` is
    above `high` the frequency is kept, below `low` it is divided by `factor`, and between it is
    `(1 - s) w / factor + s w` with `s = (r - low) / (high - low)`, which meets both ends.

    Args:
        factor: how much longer the longest wavelengths become.
        trained: the length that the model was trained on.
        low, high: numbers of turns between which frequencies are blended.

    Source: Llama Team, The Llama 3 Herd of Models, 2024, and the code released with Llama 3.1.

    >>> Llama3(factor=8.0, trained=8).frequencies(100.0, 4, torch.float32, torch.tensor(1))
    tensor([0.2047, 0.0125])
    """

    factor: float
    trained: int
    low: float = 1.0
    high: float = 4.0
    factor_on_heads = 1.0

    def __post_init__(self) -> None:
        order = _positive(self.low) and _positive(self.high) and self.low < self.high
        _check(
            "Llama3",
            vars(self),
            ("factor", _positive(self.factor), "a factor is positive", "factor=8.0"),
            ("trained", _positive(self.trained), "the trained length is positive", "trained=8192"),
            ("high", order, "high is above low, both positive", "low=1.0, high=4.0"),
        )

    def frequencies(self, theta: float, dim: int, dtype: torch.dtype, length: Tensor) -> Tensor:
        """The `[dim / 2]` frequencies; see `Scaling`."""
        kept = plain(theta, dim, dtype, length.device)
        wavelength = 2 * math.pi / kept
        divided = torch.where(wavelength > self.trained / self.low, kept / self.factor, kept)
        s = (self.trained / wavelength - self.low) / (self.high - self.low)
        blended = (1 - s) * divided / self.factor + s * divided
        between = (wavelength >= self.trained / self.high) & (wavelength <= self.trained / self.low)
        return torch.where(between, blended, divided)
