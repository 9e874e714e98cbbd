"""The sum of squares of a leaf times a factor, as one operator that reads the leaf once."""

import torch
from torch import Tensor

#: Elements that are summed in float32; these sums are added up in float64.
_AT_ONCE = 1 << 16


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
    dtype = torch.promote_types(x.dtype, torch.float32)
    if x.device.type != "cpu":
        return torch.linalg.vector_norm(x.to(dtype) * factor).square()
    flat, limits, by = x.reshape(-1), torch.finfo(dtype), factor.item()
    squares = _sum(flat, dtype)
    # Not below what has all digits, nor near what overflows.
    if not limits.tiny / limits.eps < squares < limits.max * limits.eps:
        squares, by = _sum(flat, torch.float64, by), 1.0
    return torch.tensor(squares * by * by, dtype=dtype)


def _sum(flat: Tensor, dtype: torch.dtype, by: float = 1.0) -> float:
    total = 0.0
    for part in flat.split(_AT_ONCE):
        part = part.to(dtype) if by == 1 else part.to(dtype) * by
        total += torch.dot(part, part).item()
    return total


def _shape(x: Tensor, factor: Tensor) -> Tensor:
    return x.new_empty((), dtype=torch.promote_types(x.dtype, torch.float32))


_library = torch.library.Library("fx_feather", "FRAGMENT")
_library.define("sum_squares(Tensor x, Tensor factor) -> Tensor")
_library.impl("sum_squares", sum_squares, "CompositeExplicitAutograd")
torch.library.register_fake("fx_feather::sum_squares", _shape, lib=_library)
