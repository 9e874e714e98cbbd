"""Choosing tokens: by chances, among the likeliest, from explicit seeds."""

import math

import pytest
import torch

from fx_feather.errors import GenerateError, NonFiniteError
from fx_feather.sampling import GREEDY, Sampling, uniform


def chances(sampling, logits, draws=6000):
    """How often each token is drawn, over many steps."""
    drawn = torch.cat([sampling.choose(logits.expand(100, -1), step) for step in range(draws // 100)])
    return torch.bincount(drawn, minlength=logits.shape[-1]).double() / draws


LOGITS = torch.tensor([[0.3, 2.0, -1.0, 1.1, 0.0]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(temperature=1.0), LOGITS.softmax(-1)),
        (Sampling(temperature=2.5), (LOGITS / 2.5).softmax(-1)),
        (Sampling(temperature=1.0, top_k=9), LOGITS.softmax(-1)),
        (Sampling(temperature=1.0, top_k=2), LOGITS.where(LOGITS > 1, -math.inf).softmax(-1)),
        # Chances are 0.57, 0.23, 0.10, 0.08, 0.03: the two likeliest hold 0.80.
        (Sampling(temperature=1.0, top_p=0.79), LOGITS.where(LOGITS > 1, -math.inf).softmax(-1)),
        (Sampling(temperature=1.0, top_p=0.81), LOGITS.where(LOGITS > 0.2, -math.inf).softmax(-1)),
        # Of three, the likeliest holds 0.63 of the chances.
        (Sampling(temperature=1.0, top_k=3, top_p=0.62), LOGITS.where(LOGITS > 1.5, -math.inf).softmax(-1)),
        (Sampling(temperature=1.0, top_p=1e-9), LOGITS.where(LOGITS > 1.5, -math.inf).softmax(-1)),
    ],
)
def test_tokens_are_drawn_by_their_chances(sampling, expected):
    seen = chances(sampling, LOGITS)
    torch.testing.assert_close(seen, expected[0].double(), rtol=0, atol=0.02)
    assert not (seen[expected[0] == 0] > 0).any()


def test_temperature_zero_takes_the_likeliest_and_a_low_one_nearly_so():
    assert GREEDY.choose(LOGITS, 3).tolist() == [1]
    assert chances(Sampling(temperature=1e-6), LOGITS, 200)[1] == 1
    assert Sampling(temperature=1.0).choose(torch.tensor([[-1e30, 0.0, -math.inf]]), 0).tolist() == [1]


def test_a_draw_depends_on_seed_place_and_step_alone():
    flat = torch.zeros(4, 1000)
    one = Sampling(temperature=1.0, seed=5)
    assert torch.equal(one.choose(flat, 7), Sampling(temperature=1.0, seed=5).choose(flat, 7))
    assert torch.equal(one.choose(flat, 7)[:2], one.choose(flat[:2], 7))
    assert len({tuple(Sampling(temperature=1.0, seed=s).choose(flat, t).tolist()) for s in (0, 1) for t in (0, 1)}) == 4
    assert len(set(one.choose(flat, 7).tolist())) == 4
    several = Sampling(temperature=1.0, seed=[3, 9, 3, 4]).choose(flat, 0)
    assert several[0] == several[2] != several[1]
    assert Sampling(temperature=1.0, seed=[9]).choose(flat[:1], 0) == several[1]


def test_uniform_numbers_are_spread_evenly():
    drawn = torch.tensor([uniform(1, 2, i) for i in range(4000)])
    assert drawn.min() >= 0 and drawn.max() < 1
    assert (torch.histc(drawn, 10, 0, 1) - 400).abs().max() < 80
    assert uniform(1, 23) != uniform(12, 3)


def test_settings_out_of_their_range_are_listed_at_once():
    with pytest.raises(GenerateError, match=r"^4 problems:") as error:
        Sampling(temperature=-0.5, top_k=0, top_p=0.0, seed=-1)
    for word in ("temperature is -0.5", "at least 0", "top_k is 0", "top_p is 0.0", "(0, 1]", "seed is -1", "fix:"):
        assert word in str(error.value)


@pytest.mark.parametrize("bad", [{"top_p": 1.1}, {"temperature": math.nan}, {"temperature": True}, {"seed": [1, 2.5]}])
def test_a_bad_setting_is_refused_in_five_parts(bad):
    with pytest.raises(GenerateError) as error:
        Sampling(**bad)
    for word in ("Sampling(", "got:", "problem:", "rule:", "fix:", str(next(iter(bad.values())))):
        assert word in str(error.value)


def test_logits_that_are_no_numbers_are_refused():
    logits = torch.zeros(3, 4)
    logits[1, 2] = math.nan
    with pytest.raises(NonFiniteError, match=r"those of the texts \[1\] are NaN"):
        GREEDY.choose(logits, 0)
