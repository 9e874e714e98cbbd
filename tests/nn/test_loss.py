"""Cross-entropy as sum and count, against F.cross_entropy and under any split of the batch."""

import pytest
import torch
import torch.nn.functional as F

from fx_feather.nn.loss import cross_entropy

LOGITS = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0)).double() * 3
TARGETS = torch.tensor([[0, 6, -100, 3, 3], [-100, -100, -100, 2, 1]])


def test_sum_and_gradient_equal_torch():
    def ours(logits):
        return cross_entropy(logits, TARGETS)[0]

    def theirs(logits):
        return F.cross_entropy(logits.flatten(0, 1), TARGETS.flatten(), reduction="sum")

    torch.testing.assert_close(ours(LOGITS), theirs(LOGITS), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.func.grad(ours)(LOGITS), torch.func.grad(theirs)(LOGITS), rtol=1e-12, atol=1e-12)


def test_count_is_the_exact_number_of_valid_targets():
    count = cross_entropy(LOGITS, TARGETS)[1]
    assert count.item() == 6
    assert not count.dtype.is_floating_point


def test_sums_and_counts_of_parts_add_up():
    whole = cross_entropy(LOGITS, TARGETS)
    parts = [cross_entropy(LOGITS[:, a:b], TARGETS[:, a:b]) for a, b in ((0, 1), (1, 3), (3, 5))]
    torch.testing.assert_close(sum(p[0] for p in parts), whole[0])
    assert sum(p[1] for p in parts) == whole[1]


def test_nothing_valid_is_zero_with_zero_gradients():
    targets = torch.full((2, 5), -100)
    total, count = cross_entropy(LOGITS, targets)
    assert (total.item(), count.item()) == (0.0, 0)
    assert not torch.func.grad(lambda x: cross_entropy(x, targets)[0])(LOGITS).any()


def test_another_mark_for_targets_without_a_label():
    marked = torch.where(TARGETS == -100, -1, TARGETS)
    torch.testing.assert_close(cross_entropy(LOGITS, marked, ignore_index=-1), cross_entropy(LOGITS, TARGETS))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_logits_are_summed_in_fp32(dtype):
    logits = LOGITS.to(dtype)
    total, _ = cross_entropy(logits, TARGETS)
    assert total.dtype == torch.float32
    torch.testing.assert_close(total, cross_entropy(logits.float(), TARGETS)[0])


def test_large_logits_do_not_overflow():
    total, _ = cross_entropy(torch.tensor([[1000.0, 0.0]]), torch.tensor([0]))
    assert total.item() == 0.0
