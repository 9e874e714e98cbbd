"""Matmuls by oneDNN, which comes with PyTorch and on some CPUs is faster than the BLAS behind `torch.mm`."""

import torch
from torch import Tensor


def has_onednn() -> bool:
    """Whether this PyTorch has oneDNN's linear operator, as its builds for x86 have.

    >>> matmul = "onednn" if has_onednn() else "aten"
    """
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


_LINEAR = torch.ops.mkldnn._linear_pointwise.default if has_onednn() else None


def onednn_mm(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b`, by oneDNN where that can take both as they lie in memory, and by `torch.mm` elsewhere.

    oneDNN takes float32 on CPUs, `a` row by row, and `b` row by row or column by column. Both ways sum in float32, each
    in an order of its own: the results are close, not the same bits.

    Args:
        a: `[m, k]`.
        b: `[k, n]`, of the same dtype and device.

    Returns:
        `[m, n]`.

    >>> onednn_mm(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0], [4.0]]))
    tensor([[11.]])
    """
    columns = b.t()
    if (
        _LINEAR is None
        or not a.numel()
        or a.dtype != torch.float32
        or a.device.type != "cpu"
        or not a.is_contiguous()
        # Another matrix it would multiply number by number, a thousand times slower.
        or not (b.is_contiguous() or columns.is_contiguous())
    ):
        return torch.mm(a, b)
    return _LINEAR(a, columns, None, "none", [], "")


def _shape(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


_library = torch.library.Library("fx_feather", "FRAGMENT")
_library.define("onednn_mm(Tensor a, Tensor b) -> Tensor")
_library.impl("onednn_mm", onednn_mm, "CompositeExplicitAutograd")
torch.library.register_fake("fx_feather::onednn_mm", _shape, lib=_library)
# Its result is new memory, as `reuse` asks.
torch.ops.fx_feather.onednn_mm.default.fresh = True  # type: ignore[attr-defined]
