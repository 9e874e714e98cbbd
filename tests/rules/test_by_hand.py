"""Local formulas with a vjp of their own: equal to autograd's, on ordinary values and at the edges."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fx_feather.rules import loss, norm
from fx_feather.rules.handwritten import by_hand

MINUS = float("-inf")


def gradients(fn, *xs: Tensor) -> list[Tensor]:
    xs = tuple(x.clone().requires_grad_() for x in xs)
    out = fn(*xs)
    ct = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    return [out.detach(), *torch.autograd.grad(out, xs, ct)]


@pytest.mark.parametrize("shape", [(6,), (2, 3, 6), (1, 1), (0, 4)])
@pytest.mark.parametrize("eps", [1e-5, 0.3])
def test_rms_norm(shape: tuple[int, ...], eps: float) -> None:
    x, weight = torch.randn(shape, dtype=torch.float64), torch.randn(shape[-1], dtype=torch.float64)
    ours = gradients(lambda x, w: by_hand(norm._rms, norm._rms_vjp, (x, w, eps))[0], x, weight)
    torchs = gradients(lambda x, w: F.rms_norm(x, w.shape, w, eps), x, weight)
    for a, b in zip(ours, torchs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


def test_rms_norm_of_zeros_is_zero_and_has_a_gradient() -> None:
    x, weight = torch.zeros(2, 4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    out, of_x, _ = gradients(lambda x, w: by_hand(norm._rms, norm._rms_vjp, (x, w, 1e-5))[0], x, weight)
    assert torch.equal(out, x) and of_x.isfinite().all()


def nll(logits: Tensor, rows: Tensor, part: bool) -> Tensor:
    total, picked, _ = by_hand(loss._terms, loss._terms_vjp, (logits, rows, part))
    return total - picked


LOGITS = {
    "ordinary": torch.randn(3, 4, 7, dtype=torch.float64),
    "large": 1e4 * torch.randn(3, 4, 7, dtype=torch.float64),
    "some classes ruled out": torch.randn(3, 4, 7, dtype=torch.float64).index_fill(2, torch.tensor([0, 6]), MINUS),
    "one class": torch.randn(3, 4, 1, dtype=torch.float64),
}


@pytest.mark.parametrize("part", [False, True])
@pytest.mark.parametrize("logits", LOGITS.values(), ids=LOGITS)
def test_token_nll(logits: Tensor, part: bool) -> None:
    rows = torch.randint(min(5, logits.shape[-1]), (3, 4)).clamp(max=logits.shape[-1] - 1) + (logits.shape[-1] > 5)
    ours = gradients(lambda x: nll(x, rows, part), logits)
    torchs = gradients(lambda x: F.cross_entropy(x.flatten(0, 1), rows.flatten(), reduction="none").view(3, 4), logits)
    for a, b in zip(ours, torchs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_a_part_with_no_class_left_weighs_nothing() -> None:
    logits = torch.full((2, 3), MINUS, dtype=torch.float64)
    total, _, softmax = loss._terms(logits, torch.tensor([0, 1]), True)
    assert (total == MINUS).all()
    no_part_of_it = (*torch.zeros(2, 2, dtype=torch.float64), None)
    grad, _ = loss._terms_vjp(no_part_of_it, (None, None, softmax), logits, torch.tensor([0, 1]), True)
    assert torch.equal(grad, torch.zeros(2, 3, dtype=torch.float64))
