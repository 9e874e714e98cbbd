"""Grouped matmul: rows that are sorted by group, each group with a matrix of its own."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_library = torch.library.Library("fx_feather", "FRAGMENT")
_library.define("grouped_matmul(Tensor x, Tensor w, Tensor ends) -> Tensor")
_library.define("grouped_outer(Tensor x, Tensor y, Tensor ends) -> Tensor")

_ALIGNED = 8
"""Sizes that the fused operator takes: multiples of 16 bytes in bf16."""


def _fused(one: Tensor, two: Tensor, *sizes: int) -> bool:
    """Whether torch has one operator for all groups, which needs no sizes on the host: in bf16, aligned."""
    return one.dtype == two.dtype == torch.bfloat16 and not any(n % _ALIGNED for n in sizes)


def _matmul(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    if _fused(x, w, x.shape[1], w.shape[2]):
        out = F.grouped_mm(x.contiguous(), w, offs=ends.to(torch.int32))
        # The operator leaves what lies after the last group as it finds it.
        row = torch.arange(x.shape[0], device=x.device)
        return torch.where((row < ends[-1]).unsqueeze(1), out, 0.0)
    out, start = x.new_zeros(x.shape[0], w.shape[2]), 0
    for group, end in enumerate(ends.tolist()):
        if end > start:
            out[start:end] = x[start:end] @ w[group]
        start = end
    return out


def _outer(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    if _fused(x, y, x.shape[1], y.shape[1]):
        out = F.grouped_mm(x.contiguous().mT, y.contiguous(), offs=ends.to(torch.int32))
        empty = torch.diff(ends, prepend=ends.new_zeros(1)) == 0
        return torch.where(empty.view(-1, 1, 1), 0.0, out)
    out, start = x.new_zeros(ends.shape[0], x.shape[1], y.shape[1]), 0
    for group, end in enumerate(ends.tolist()):
        if end > start:
            out[group] = x[start:end].mT @ y[start:end]
        start = end
    return out


_library.impl("grouped_matmul", _matmul, "CompositeExplicitAutograd")
_library.impl("grouped_outer", _outer, "CompositeExplicitAutograd")
torch.library.register_fake(
    "fx_feather::grouped_matmul", lambda x, w, ends: x.new_empty(x.shape[0], w.shape[2]), lib=_library
)
torch.library.register_fake(
    "fx_feather::grouped_outer", lambda x, y, ends: x.new_empty(ends.shape[0], x.shape[1], y.shape[1]), lib=_library
)


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
        return torch.ops.fx_feather.grouped_matmul(x, w, ends)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *cts: Any) -> Any:
        x, w, ends = ctx.saved_tensors
        return _Matmul.apply(cts[0], w.mT, ends), _Outer.apply(x, cts[0], ends), None


class _Outer(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
        return torch.ops.fx_feather.grouped_outer(x, y, ends)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *cts: Any) -> Any:
        x, y, ends = ctx.saved_tensors
        return _Matmul.apply(y, cts[0].mT, ends), _Matmul.apply(x, cts[0], ends), None


def grouped_matmul(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """Multiplies each group of rows by the matrix of its group.

    `y[i] = x[i] w[g(i)]`. With a cotangent `c` of `y`, that of `x` is `c[i] w[g(i)]^T`, again a grouped matmul, and
    that of `w[g]` is the sum over the group's rows of `x[i] c[i]^T`; the vjp of that sum is two grouped matmuls.

    Args:
        x: `[rows, in]`, sorted by group.
        w: `[groups, in, out]`.
        ends: int`[groups]`, where each group ends, not decreasing. Rows after the last end belong to no group.

    Returns:
        `[rows, out]`, zero in rows of no group.

    >>> grouped_matmul(torch.ones(3, 1), torch.tensor([[[2.0]], [[5.0]]]), torch.tensor([1, 2])).flatten()
    tensor([2., 5., 0.])
    """
    out: Tensor = _Matmul.apply(x, w, ends)
    return out
