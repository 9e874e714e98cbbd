"""Routers, experts and their balance, each against its definition."""

import math

import pytest
import torch
import torch.nn.functional as F

from fx_feather.errors import ShapeError
from fx_feather.nn import balance, moe, router
from fx_feather.nn.balance import Penalties
from fx_feather.param import init

B, S, D, H, E, K = 2, 6, 5, 4, 8, 3


def setting(seed=0):
    torch.manual_seed(seed)
    params = init(moe.template(D, H, E, dtype=torch.float64))
    scores = torch.randn(B, S, E).double().softmax(-1)
    weights, index = router.top(scores, K)
    return params, torch.randn(B, S, D).double(), weights, index


def assert_same(one, two, *args):
    """Outputs and all gradients of two functions of params, h and weights."""
    params, h, weights, index = args
    out, expected = one(params, h, weights, index), two(params, h, weights, index)
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-11)
    ct = torch.randn_like(out)
    grads = [
        torch.func.grad(lambda p, h, w, f=f: (f(p, h, w, index) * ct).sum(), argnums=(0, 1, 2))(params, h, weights)
        for f in (one, two)
    ]
    for name in params:
        torch.testing.assert_close(grads[0][0][name], grads[1][0][name], rtol=1e-11, atol=1e-11)
    for a, b in zip(grads[0][1:], grads[1][1:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("seed", range(3))
def test_dropless_equals_the_loop(seed):
    assert_same(moe.dropless, moe.loop, *setting(seed))


def test_dropless_when_all_tokens_choose_one_expert():
    params, h, weights, index = setting()
    assert_same(moe.dropless, moe.loop, params, h, weights, torch.full_like(index, 5))


def test_unlimited_capacity_equals_the_loop():
    assert_same(lambda p, h, w, i: moe.limited(p, h, w, i, S * K)[0], moe.loop, *setting())


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_choice_is_dropped_when_its_expert_is_full(size):
    params, h, weights, index = setting()
    kept = torch.zeros(B, S, K, dtype=torch.bool)
    for b in range(B):
        room = [size] * E
        for s in range(S):
            for k in range(K):
                e = int(index[b, s, k])
                kept[b, s, k] = room[e] > 0
                room[e] -= 1
    assert torch.equal(moe.limited(params, h, weights, index, size)[1], kept)
    assert not kept.all()
    dropped = lambda p, h, w, i: moe.loop(p, h, w * kept, i)  # noqa: E731
    assert_same(lambda p, h, w, i: moe.limited(p, h, w, i, size)[0], dropped, params, h, weights, index)


def test_capacity_is_a_share_of_a_sequence():
    assert moe.capacity(1.0, 64, 2, 8) == 16
    assert moe.capacity(1.25, 64, 2, 8) == 20
    assert moe.capacity(100.0, 64, 2, 8) == 64
    assert moe.capacity(1.0, 3, 1, 8) == 1


def test_groups_are_kept_by_the_sum_of_their_best():
    scores = torch.randn(B, S, E)
    for groups, kept, best in ((4, 2, 1), (2, 1, 2), (4, 3, 2)):
        out = router.within_groups(scores, groups, kept, best, -math.inf)
        for b in range(B):
            for s in range(S):
                parts = scores[b, s].view(groups, -1)
                worth = parts.sort(-1, descending=True).values[:, :best].sum(-1)
                order = worth.argsort(descending=True)[:kept].tolist()
                expected = torch.stack(
                    [p if g in order else torch.full_like(p, -math.inf) for g, p in enumerate(parts)]
                )
                assert torch.equal(out[b, s], expected.flatten())


def test_weights_come_from_scores_and_experts_from_the_choice():
    scores, bias = torch.rand(B, S, E), torch.tensor([0.0] * (E - 1) + [9.0])
    weights, index = router.top(scores, K, scores + bias)
    assert (index[..., 0] == E - 1).all()
    assert torch.equal(weights, scores.gather(-1, index))
    torch.testing.assert_close(router.normalized(weights).sum(-1), torch.ones(B, S))
    assert torch.func.grad(lambda b: router.top(scores, K, scores + b)[0].sum())(bias).abs().sum() == 0


def test_bf16_tokens_are_routed_in_fp32():
    h, weight = torch.randn(1, 4, 64).bfloat16(), torch.randn(64, E).bfloat16()
    torch.testing.assert_close(router.logits(weight, h), h.float() @ weight.float(), rtol=0, atol=0)
    assert router.template(8, 4, bias=True, dtype=torch.bfloat16)["bias"].dtype == torch.float32


def test_statistics_count_each_choice_once():
    _, _, _, index = setting()
    logits = torch.randn(B, S, E)
    out = balance.statistics(Penalties(per_layer=1, sequence=1, z=1), logits, logits.softmax(-1), index)
    assert torch.equal(out["load"], torch.bincount(index.flatten(), minlength=E).float())
    assert out["load"].sum() == B * S * K
    torch.testing.assert_close(out["share"], logits.softmax(-1).sum((0, 1)))
    torch.testing.assert_close(out["z"], torch.logsumexp(logits, -1).pow(2).sum())
    expected = 0.0
    for b in range(B):
        f = torch.bincount(index[b].flatten(), minlength=E) * E / (K * S)
        expected += (f * logits[b].softmax(-1).mean(0)).sum()
    torch.testing.assert_close(out["sequence"], expected)


def test_penalties_are_named_and_add_up():
    logits = torch.randn(3, B, S, E)
    index = torch.stack([router.top(x, K)[1] for x in logits])
    every = Penalties(per_layer=0.5, pooled=0.25, sequence=2.0, z=0.125)
    layers = [balance.statistics(every, x, x.softmax(-1), i) for x, i in zip(logits, index, strict=True)]

    def of(x, i):
        f = F.one_hot(i, E).sum(-2).float().flatten(0, -2).mean(0)
        return E * (f * x.softmax(-1).flatten(0, -2).mean(0)).sum()

    expected = {
        "per_layer": sum(of(x, i) for x, i in zip(logits, index, strict=True)) / 3,
        "pooled": of(logits, index),
        "sequence": sum(of(x, i) for x, i in zip(logits.flatten(0, 1), index.flatten(0, 1), strict=True)) / (3 * B * K),
        "z": logits.logsumexp(-1).square().mean(),
    }
    for name, value in expected.items():
        torch.testing.assert_close(balance.penalty(Penalties(**{name: 1.0}), layers, B, S), value)
    total = sum(getattr(every, name) * value for name, value in expected.items())
    torch.testing.assert_close(balance.penalty(every, layers, B, S), total)
    assert balance.penalty(Penalties(), layers, B, S) is None


def test_even_load_costs_least():
    even = torch.full((E,), 4.0)
    assert balance.balance(even, even / K, 4 * E // K) > 0
    skewed = torch.tensor([8.0] * (E // 2) + [0.0] * (E // 2))
    assert balance.balance(even, even, 4 * E) < balance.balance(skewed, skewed, 4 * E)
    assert balance.balance(K * even, even, 4 * E) == K


def test_the_bias_moves_against_the_load():
    load = torch.tensor([[5.0, 1.0, 3.0], [2.0, 2.0, 2.0]])
    bias = balance.nudged(torch.zeros(2, 3, dtype=torch.float64), load, rate=0.5)
    assert bias.tolist() == [[-0.5, 0.5, 0.0], [0.0, 0.0, 0.0]]


def test_bad_penalties_are_listed_at_once():
    with pytest.raises(ShapeError, match=r"^2 problems:") as error:
        Penalties(pooled=-1.0, z=math.nan)
    assert "pooled is -1.0" in str(error.value) and "z is nan" in str(error.value)
