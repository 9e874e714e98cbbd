"""The sum of squares beside its formula in operators of torch."""

import numpy as np
import pytest
import torch

from fx_feather.kernels import squares, sum_squares


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7, 3), (300, 400), (700, 1001)])
@pytest.mark.parametrize("factor", [1.0, 1 / 3, 1e-6, 0.0])
def test_it_is_the_formula(dtype: torch.dtype, shape: tuple[int, ...], factor: float) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    got, want = sum_squares(x, torch.tensor(factor, dtype=wide)), ((x.double() * factor) ** 2).sum()
    assert got.dtype == torch.float64 and got.shape == ()
    torch.testing.assert_close(got.double(), want, rtol=1e-12 if dtype == torch.float64 else 1e-6, atol=0)


def _in_the_worst_order(x: torch.Tensor, y: torch.Tensor | None = None, **settings: torch.dtype) -> torch.Tensor:
    """The sum of `x`, or of `x * y`, one term after another, each sum rounded."""
    products = (x if y is None else x * y).to(settings.get("dtype", x.dtype)).numpy()
    return torch.tensor(np.add.accumulate(products)[-1])


@pytest.mark.parametrize("size", [1, 16, 5000, 65536, 700001, 3500000])
@pytest.mark.parametrize("each", [1 / 3, 0.1, 1.7])
def test_no_order_in_which_a_library_adds_makes_it_less_exact(
    size: int, each: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal squares are rounded in the same way again and again; such a sum has no digits left after many."""
    monkeypatch.setattr(torch, "dot", _in_the_worst_order)
    monkeypatch.setattr(torch.Tensor, "sum", _in_the_worst_order)
    x = torch.full((size,), each)
    got, want = squares._on_cpu(x, 1.0), size * x[0].item() ** 2
    assert abs(got / want - 1) < 1e-6


def test_the_worst_order_is_bad() -> None:
    x = torch.full((700001,), 1 / 3)
    assert abs(_in_the_worst_order(x, x) / (x[0].item() ** 2 * 700001) - 1) > 1e-3


def test_equal_squares_are_as_exact_as_others() -> None:
    """Each is rounded in the same way when it is added to many before it."""
    x = torch.full((700001,), 1 / 3)
    want = (x.double() ** 2).sum()
    torch.testing.assert_close(sum_squares(x, torch.tensor(1.0)).double(), want, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("size", "factor"), [(1e30, 1e-30), (1e-30, 1e30), (3e19, 1e-3), (1e-21, 1.0), (1e-21, 1e6)])
def test_squares_out_of_range_are_taken_of_the_product(size: float, factor: float) -> None:
    """Gradients of a sum over many tokens are large, and their mean is not."""
    x = torch.full((70000,), size)
    got = sum_squares(x, torch.tensor(factor))
    want = 70000 * (torch.tensor(size).double() * torch.tensor(factor).double()) ** 2
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    x = torch.ones(100000)
    x[77777] = bad
    assert not sum_squares(x, torch.tensor(0.5)).isfinite()


def test_the_order_in_memory_does_not_matter() -> None:
    x = torch.arange(12.0).reshape(3, 4)
    assert sum_squares(x.t(), torch.tensor(2.0)) == sum_squares(x, torch.tensor(2.0)) == 4 * 506


def test_leaves_of_zeros_are_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "to", None)
    assert squares._on_cpu(torch.zeros(5000), 2.0) == 0


@pytest.mark.parametrize("n", [65_536, 65_537, 12 * 131_072 + 5, 24 * 131_072, 13 * 131_072 + 1])
def test_rows_of_any_number_are_all_summed(n: int) -> None:
    x = torch.randn(n, generator=torch.Generator().manual_seed(0))
    want = x.double().square().sum()
    torch.testing.assert_close(sum_squares(x, torch.tensor(1.0)), want, rtol=1e-6, atol=0)
