"""Matmuls by oneDNN, which comes with PyTorch and on some CPUs is faster than the BLAS behind `torch.mm`."""

import statistics
import time
from collections.abc import Callable, Sequence

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


def faster_matmul(products: Sequence[tuple[int, int, int]] = ((512, 512, 512), (512, 512, 2048))) -> str:
    """Which way to multiply float32 matrices is faster on this CPU, for `compile_step(..., matmul=...)`; measured.

    On some CPUs oneDNN takes a tenth less time, on others a tenth more. Each product is measured as a layer and its
    backward need it, `x @ w`, `g @ w.T` and `x.T @ g`, both ways in turns. All ranks of a run must compile the same, so
    one of them should ask, and tell the others.

    A step replaces only products of 2^24 multiplications or more, and lays out `x.T` once for all products that it is
    in: what is measured here is a little worse for oneDNN than a step.

    Args:
        products: `(m, k, n)` of each `[m, k] @ [k, n]`.

    Returns:
        `onednn`, if it is there and takes less than 0.98 of the time of the other; else `aten`.

    >>> faster_matmul([(8, 8, 8)]) in ("aten", "onednn")
    True
    """
    if not has_onednn():
        return "aten"
    ways: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"aten": torch.mm, "onednn": onednn_mm}
    total = dict.fromkeys(ways, 0.0)
    with torch.no_grad():
        for m, k, n in products:
            x, w, g = torch.ones(m, k), torch.ones(k, n), torch.ones(m, n)
            took: dict[str, list[float]] = {name: [] for name in ways}
            begin = time.perf_counter()
            while len(took["onednn"]) < 3 or (len(took["onednn"]) < 12 and time.perf_counter() - begin < 0.3):
                for name, mm in ways.items():
                    start = time.perf_counter()
                    mm(x, w)
                    mm(g, w.t())
                    # oneDNN takes no left operand column by column: it is laid out anew, as in a compiled program.
                    mm(x.t().contiguous() if name == "onednn" else x.t(), g)
                    took[name].append(time.perf_counter() - start)
            for name, seconds in took.items():
                total[name] += statistics.median(seconds)
    return "onednn" if total["onednn"] < 0.98 * total["aten"] else "aten"


def _shape(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


_library = torch.library.Library("fx_feather", "FRAGMENT")
_library.define("onednn_mm(Tensor a, Tensor b) -> Tensor")
_library.impl("onednn_mm", onednn_mm, "CompositeExplicitAutograd")
torch.library.register_fake("fx_feather::onednn_mm", _shape, lib=_library)
# Its result is new memory, as `reuse` asks.
torch.ops.fx_feather.onednn_mm.default.fresh = True  # type: ignore[attr-defined]
