"""Grouped matmul and experts: equal to a loop, with vjps that are equal to finite differences, twice."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fx_feather.kernels import experts, grouped_matmul

ENDS = {"plain": [2, 5, 9], "empty groups": [0, 0, 4, 4, 9, 9], "rest": [3, 3, 6], "none": [0, 0]}


@pytest.mark.parametrize("ends", ENDS)
def test_grouped_matmul_and_its_vjps(ends):
    torch.manual_seed(0)
    ends = torch.tensor(ENDS[ends])
    x = torch.randn(9, 3, dtype=torch.float64, requires_grad=True)
    w = torch.randn(len(ends), 3, 2, dtype=torch.float64, requires_grad=True)
    expected = torch.zeros(9, 2, dtype=torch.float64)
    for g, (start, end) in enumerate(zip([0, *ends.tolist()], ends.tolist(), strict=False)):
        expected[start:end] = x[start:end].detach() @ w[g].detach()
    torch.testing.assert_close(grouped_matmul(x, w, ends).detach(), expected, rtol=0, atol=0)
    assert torch.autograd.gradcheck(lambda x, w: grouped_matmul(x, w, ends), (x, w))
    assert torch.autograd.gradgradcheck(lambda x, w: grouped_matmul(x, w, ends), (x, w))


@pytest.mark.parametrize("ends", ENDS)
def test_bf16_in_one_operator_is_the_loop(ends):
    torch.manual_seed(0)
    ends = torch.tensor(ENDS[ends])
    x, w, c = torch.randn(9, 8), torch.randn(len(ends), 8, 16), torch.randn(9, 16)

    def run(dtype, columns=16):
        leaves = [t[..., :n].to(dtype).requires_grad_() for t, n in ((x, 8), (w, columns))]
        out = grouped_matmul(*leaves, ends)
        return out, *torch.autograd.grad(out, leaves, c[:, :columns].to(dtype))

    for one, two in zip(run(torch.bfloat16), run(torch.float32), strict=True):
        torch.testing.assert_close(one.float(), two, rtol=2e-2, atol=5e-2)
        assert (one == 0).sum() >= (two == 0).sum()
    # 13 columns are not aligned: a loop of the same products.
    for one, two in zip(run(torch.bfloat16, 13), run(torch.float32, 13), strict=True):
        torch.testing.assert_close(one.float(), two, rtol=2e-2, atol=5e-2)


def test_the_joint_graph_has_no_size_that_depends_on_values():
    torch.manual_seed(0)
    args = [torch.randn(*s, dtype=torch.float64) for s in ((6, 4), (6, 2), (3, 4, 5), (3, 4, 5), (3, 5, 4))]
    index = torch.randint(0, 3, (6, 2))

    def grads(index, x, weights, gate, up, down):
        out, pull = torch.func.vjp(lambda *p: experts(p[0], index, *p[1:]), x, weights, gate, up, down)
        return pull(torch.cos(out))

    graph = make_fx(grads, tracing_mode="fake")(index, *args)
    for other in (index, torch.zeros_like(index), torch.full_like(index, 7), torch.randint(0, 3, (6, 2))):
        for one, two in zip(graph(other, *args), grads(other, *args), strict=True):
            assert torch.equal(one, two)


def test_choices_of_experts_elsewhere_count_for_nothing():
    torch.manual_seed(0)
    x, weights = torch.randn(5, 4), torch.rand(5, 2)
    gate, up, down = torch.randn(4, 4, 3), torch.randn(4, 4, 3), torch.randn(4, 3, 4)
    index = torch.randint(0, 4, (5, 2))
    whole = experts(x, index, weights, gate, up, down)
    halves = [experts(x, index - i, weights, *(w[i : i + 2] for w in (gate, up, down))) for i in (0, 2)]
    torch.testing.assert_close(halves[0] + halves[1], whole)
