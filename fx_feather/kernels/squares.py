"""The sum of squares of a leaf times a factor, as one operator that reads the leaf once."""

import math

import torch
from torch import Tensor

#: Squares that are summed in float32; these sums are added up in float64.
_ROW = 1 << 10

#: Elements that are widened at a time, where squares are out of range.
_AT_ONCE = 1 << 18


def sum_squares(x: Tensor, factor: Tensor) -> Tensor:
    """`((x * factor) ** 2).sum()`, in float32 or wider.

    On a CPU the squares of `x` alone are summed, and the factor comes last: operators of torch take three passes.
    Where such squares are too large or too small for their dtype, `x` meets the factor first, in float64.

    Args:
        x: any shape and floating dtype.
        factor: float[], on the device of `x`.

    Returns:
        float[], in the dtype of `x`, or float32 if that is wider.

    >>> sum_squares(torch.tensor([3.0, 4.0]), torch.tensor(2.0))
    tensor(100.)
    """
    return _many([[x, factor]])[0]


def _many(calls: list[list[Tensor]]) -> list[Tensor]:
    """Many calls at once; of leaves that must be widened or laid out anew, one copy is there at a time."""
    number = {k: factor.item() for k, factor in {id(f): f for x, f in calls if x.device.type == "cpu"}.items()}
    return [
        torch.tensor(_on_cpu(x.reshape(-1).to(_wide(x)), number[id(factor)]), dtype=_wide(x))
        if x.device.type == "cpu"
        # To look at numbers would wait for the device.
        else torch.linalg.vector_norm(x.to(_wide(x)) * factor.to(_wide(x))).square()
        for x, factor in calls
    ]


def _on_cpu(flat: Tensor, by: float) -> float:
    limits, squares = torch.finfo(flat.dtype), _squares(flat)
    # Not below what has all digits, nor near what overflows.
    if limits.tiny / limits.eps < squares < limits.max * limits.eps:
        return squares * by * by
    if math.isnan(squares) or not flat.count_nonzero():
        return squares
    return sum(_squares(part.to(torch.float64) * by) for part in flat.split(_AT_ONCE))


def _squares(flat: Tensor) -> float:
    whole = flat.numel() // _ROW * _ROW
    total = 0.0
    if whole:
        norms = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1).to(torch.float64)
        total += torch.dot(norms, norms).item()
    if whole < flat.numel():
        total += torch.dot(flat[whole:], flat[whole:]).item()
    return total


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _shape(x: Tensor, factor: Tensor) -> Tensor:
    return x.new_empty((), dtype=_wide(x))


_library = torch.library.Library("fx_feather", "FRAGMENT")
_library.define("sum_squares(Tensor x, Tensor factor) -> Tensor")
_library.impl("sum_squares", sum_squares, "CompositeExplicitAutograd")
torch.library.register_fake("fx_feather::sum_squares", _shape, lib=_library)
torch.ops.fx_feather.sum_squares.default.at_once = _many  # type: ignore[attr-defined]  # for `backend.together`
