"""The sum of squares of a leaf times a factor, as one operator that reads the leaf once."""

from collections.abc import Sequence

import torch
from torch import Tensor

#: Elements that are summed in float32; these sums are added up in float64.
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
    """Many calls at once."""
    if any(x.device.type != "cpu" for x, _ in calls):
        # To look at numbers would wait for the device.
        norms = torch._foreach_norm([x.to(_wide(x)) * factor for x, factor in calls])
        return [norm.square() for norm in norms]
    number = {k: factor.item() for k, factor in {id(factor): factor for _, factor in calls}.items()}
    parts = [_parts(x) for x, _ in calls]
    sums = iter(_squares([p for ps in parts for p in ps]))
    totals = [
        _total(ps, sum(next(sums) for _ in ps), number[id(factor)])
        for ps, (_, factor) in zip(parts, calls, strict=True)
    ]
    dtypes = [ps[0].dtype for ps in parts]
    if len(set(dtypes)) == 1:
        return list(torch.tensor(totals, dtype=dtypes[0]).unbind())
    return [torch.tensor(total, dtype=dtype) for total, dtype in zip(totals, dtypes, strict=True)]


def _parts(x: Tensor) -> Sequence[Tensor]:
    flat = x.reshape(-1)
    if x.dtype not in (torch.float32, torch.float64):
        flat = flat.to(_wide(x))
    return (flat,) if flat.numel() <= _AT_ONCE else flat.split(_AT_ONCE)


def _total(parts: Sequence[Tensor], squares: float, by: float) -> float:
    limits = torch.finfo(parts[0].dtype)
    # Not below what has all digits, nor near what overflows.
    if limits.tiny / limits.eps < squares < limits.max * limits.eps:
        return squares * by * by
    return sum(_squares([p.to(torch.float64) * by for p in parts]))


def _squares(parts: list[Tensor]) -> list[float]:
    return [norm * norm for norm in torch.stack(torch._foreach_norm(parts)).tolist()]


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _shape(x: Tensor, factor: Tensor) -> Tensor:
    return x.new_empty((), dtype=_wide(x))


_library = torch.library.Library("fx_feather", "FRAGMENT")
_library.define("sum_squares(Tensor x, Tensor factor) -> Tensor")
_library.impl("sum_squares", sum_squares, "CompositeExplicitAutograd")
torch.library.register_fake("fx_feather::sum_squares", _shape, lib=_library)
# What `backend.together` asks: how many calls run at once, and which arguments are then written over.
torch.ops.fx_feather.sum_squares.default.at_once = _many  # type: ignore[attr-defined]
torch.ops.fx_feather.sum_squares.default.at_once_over = ()  # type: ignore[attr-defined]
