"""The sum of squares of a leaf times a factor, as one operator that reads the leaf once."""

import functools as ft
import math

import torch
from torch import Tensor

#: Squares that meet in one float32 sum, at most: in any order each is then exact to 12 roundings, 7e-7. A dot of many
#: numbers is as exact as the order in which the BLAS of a CPU adds them.
_TERMS = 12
#: How many such sums there are at a time, at most. They are added up in float64.
_MOST = 1 << 17
#: A leaf of so many elements is widened as a whole, which then costs less than the calls for rows of it.
_SMALL = 1 << 16


def sum_squares(x: Tensor, factor: Tensor) -> Tensor:
    """`((x * factor) ** 2).sum()`, in float64: the sum of what float32 holds has no overflow.

    On a CPU the squares of `x` alone are summed, and the factor comes last: operators of torch take three passes.
    Where such squares are too large or too small for their dtype, `x` meets the factor first, in float64.

    Args:
        x: any shape and floating dtype.
        factor: float[], on the device of `x`.

    Returns:
        float64[].

    >>> sum_squares(torch.tensor([3.0, 4.0]), torch.tensor(2.0))
    tensor(100., dtype=torch.float64)
    """
    return _many([[x, factor]])[0]


def _many(calls: list[list[Tensor]]) -> list[Tensor]:
    """Many calls at once, of leaves of one dtype; of copies, widened or laid out anew, one is there at a time."""
    dtype = _wide(calls[0][0].dtype)
    if calls[0][0].device.type != "cpu":
        # To look at numbers would wait for the device.
        return [
            torch.linalg.vector_norm(x.to(dtype) * factor.to(dtype), dtype=torch.float64).square()
            for x, factor in calls
        ]
    number = {k: factor.item() for k, factor in {id(factor): factor for _, factor in calls}.items()}
    totals = [_on_cpu(x.reshape(-1).to(dtype), number[id(factor)]) for x, factor in calls]
    return list(torch.tensor(totals, dtype=torch.float64).unbind())


def _on_cpu(flat: Tensor, by: float) -> float:
    (least, most), squares = _range(flat.dtype), _squares(flat)
    if least < squares < most:
        return squares * by * by
    if math.isnan(squares) or not flat.count_nonzero():
        return squares
    # Widened part by part, not to have all of it twice.
    return sum(_squares(part.to(torch.float64) * by) for part in flat.split(_MOST))


@ft.cache
def _range(dtype: torch.dtype) -> tuple[float, float]:
    """Sums not below this have all digits; none up to that is near what overflows."""
    limits = torch.finfo(dtype)
    return limits.tiny / limits.eps, limits.max * limits.eps


def _squares(flat: Tensor) -> float:
    if flat.dtype == torch.float64:
        return torch.dot(flat, flat).item()
    if flat.numel() <= _SMALL:
        wide = flat.double()
        return torch.dot(wide, wide).item()
    n = min(_MOST, -(-flat.numel() // _TERMS))
    return sum(_rows(part, n) for part in flat.split(n * _TERMS))


def _rows(flat: Tensor, n: int) -> float:
    """The sum of the squares of up to `_TERMS` rows of `n` numbers, the last of which may be shorter."""
    first, *whole = flat.split(n)
    sums = first * first
    if whole and whole[-1].numel() < n:
        last = whole.pop()
        sums[: last.numel()].addcmul_(last, last)
    # On a CPU this is a loop over the lists: one call of Python for all rows, which are added one after another.
    if whole:
        torch._foreach_addcmul_([sums] * len(whole), whole, whole)
    return sums.sum(dtype=torch.float64).item()


@ft.cache
def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _shape(x: Tensor, factor: Tensor) -> Tensor:
    return x.new_empty((), dtype=torch.float64)


_library = torch.library.Library("fx_feather", "FRAGMENT")
_library.define("sum_squares(Tensor x, Tensor factor) -> Tensor")
_library.impl("sum_squares", sum_squares, "CompositeExplicitAutograd")
torch.library.register_fake("fx_feather::sum_squares", _shape, lib=_library)
torch.ops.fx_feather.sum_squares.default.at_once = _many  # type: ignore[attr-defined]  # for `backend.together`
