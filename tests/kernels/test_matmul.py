"""A product by oneDNN is the product, however its operands lie in memory."""

from collections.abc import Callable

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from fx_feather.kernels import faster_matmul, has_onednn, matmul, onednn_mm


def rows(m: int, n: int) -> torch.Tensor:
    return torch.randn(m, n, generator=torch.Generator().manual_seed(m * 1000 + n))


LAID = {
    "row by row": lambda m, n: rows(m, n),
    "column by column": lambda m, n: rows(n, m).t(),
    "a part of rows": lambda m, n: rows(m, n + 3)[:, 1 : n + 1],
    "a part of columns": lambda m, n: rows(n, m + 2).t()[1 : m + 1],
    "every other row": lambda m, n: rows(2 * m, n)[::2],
    "one row many times": lambda m, n: rows(1, n).expand(m, n),
}


@pytest.mark.parametrize("left", LAID)
@pytest.mark.parametrize("right", LAID)
@pytest.mark.parametrize("sizes", [(8, 5, 7), (1, 9, 4), (6, 1, 3), (4, 8, 1), (0, 4, 3), (3, 0, 2), (3, 2, 0)])
def test_it_is_the_product(left: str, right: str, sizes: tuple[int, int, int]) -> None:
    m, k, n = sizes
    a, b = LAID[left](m, k), LAID[right](k, n)
    got, want = torch.ops.fx_feather.onednn_mm(a, b), torch.mm(a.double(), b.double())
    assert got.dtype == torch.float32 and got.is_contiguous()
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_multiplied_as_ever(dtype: torch.dtype) -> None:
    a, b = rows(4, 6).to(dtype), rows(6, 5).to(dtype)
    assert torch.equal(onednn_mm(a, b), a @ b)


@pytest.mark.skipif(not has_onednn(), reason="this PyTorch has no linear operator of oneDNN")
@pytest.mark.parametrize(
    ("left", "right", "by_onednn"),
    [
        ("row by row", "row by row", True),
        ("row by row", "column by column", True),
        ("column by column", "row by row", False),
        ("row by row", "a part of rows", False),
    ],
)
def test_onednn_is_given_what_it_takes_as_it_lies(left: str, right: str, by_onednn: bool) -> None:
    a, b = LAID[left](16, 8), LAID[right](8, 12)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        onednn_mm(a, b)
    names = {e.key for e in seen.key_averages()}
    assert ("mkldnn::_linear_pointwise" in names, "aten::mm" in names) == (by_onednn, not by_onednn)
    assert not names & {"aten::clone", "aten::contiguous", "aten::copy_"}, "an operand was copied"


@pytest.mark.parametrize(("slow", "found"), [("aten", "onednn"), ("onednn", "aten"), ("none", "aten")])
@pytest.mark.skipif(not has_onednn(), reason="this PyTorch has no linear operator of oneDNN")
def test_the_faster_way_is_found(slow: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that only the slow way moves."""
    now = 0.0

    def moving(name: str, mm: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            nonlocal now
            now += 2.0 if name == slow else 1.0
            return mm(a, b)

        return run

    monkeypatch.setattr(matmul.time, "perf_counter", lambda: now)
    monkeypatch.setattr(matmul, "onednn_mm", moving("onednn", onednn_mm))
    monkeypatch.setattr(torch, "mm", moving("aten", torch.mm))
    assert faster_matmul([(4, 3, 2)]) == found


def test_without_onednn_there_is_one_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "has_onednn", lambda: False)
    assert faster_matmul() == "aten"
