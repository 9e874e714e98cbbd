"""Methods for longer texts: equal to the reference implementation's, and with the properties they are derived from."""

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from fx_feather.errors import ShapeError
from fx_feather.nn import rope
from fx_feather.nn.rope_scaling import Dynamic, Linear, Llama3, Yarn, plain

TRAINED = 512
KINDS = {
    "none": (None, {"rope_type": "default"}),
    "linear 4": (Linear(factor=4.0), {"rope_type": "linear", "factor": 4.0}),
    "linear 2.5": (Linear(factor=2.5), {"rope_type": "linear", "factor": 2.5}),
    "dynamic 2": (Dynamic(factor=2.0, trained=TRAINED), {"rope_type": "dynamic", "factor": 2.0}),
    "dynamic 8": (Dynamic(factor=8.0, trained=TRAINED), {"rope_type": "dynamic", "factor": 8.0}),
    "yarn": (
        Yarn(factor=4.0, trained=TRAINED),
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED},
    ),
    "yarn, mscale": (
        Yarn(factor=40.0, trained=TRAINED, mscale=1.0, mscale_all_dim=0.707),
        {
            "rope_type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": TRAINED,
            "mscale": 1.0,
            "mscale_all_dim": 0.707,
        },
    ),
    "yarn, betas, not truncated": (
        Yarn(factor=16.0, trained=TRAINED, beta_fast=8.0, beta_slow=0.5, truncate=False),
        {
            "rope_type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": TRAINED,
            "beta_fast": 8.0,
            "beta_slow": 0.5,
            "truncate": False,
        },
    ),
    "yarn, attention_factor": (
        Yarn(factor=4.0, trained=TRAINED, attention_factor=1.3),
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED, "attention_factor": 1.3},
    ),
    "llama3": (
        Llama3(factor=8.0, trained=TRAINED),
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "original_max_position_embeddings": TRAINED,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    ),
    "llama3, wide": (
        Llama3(factor=32.0, trained=TRAINED, low=0.5, high=16.0),
        {
            "rope_type": "llama3",
            "factor": 32.0,
            "original_max_position_embeddings": TRAINED,
            "low_freq_factor": 0.5,
            "high_freq_factor": 16.0,
        },
    ),
}


def reference(parameters, dim, theta, length):
    """Tables from the reference implementation's frequencies, as its models make them."""
    config = LlamaConfig(
        hidden_size=dim,
        num_attention_heads=1,
        max_position_embeddings=TRAINED,
        rope_parameters={"rope_theta": theta, **parameters},
    )
    if parameters["rope_type"] == "default":
        frequencies, factor = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim), 1.0
    else:
        frequencies, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, None, seq_len=torch.tensor(length))
    angles = torch.arange(length).float()[:, None] * frequencies
    return angles.cos() * factor, angles.sin() * factor


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("theta", [500.0, 10000.0, 500000.0])
@pytest.mark.parametrize("dim", [8, 64, 128])
def test_tables_equal_the_reference_implementations(kind, theta, dim):
    scaling, parameters = KINDS[kind]
    for length in (1, 100, TRAINED, 700, 4096):
        cos, sin = rope.tables(torch.arange(length)[None], dim, theta, scaling=scaling)
        expected_cos, expected_sin = reference(parameters, dim, theta, length)
        for half in (slice(0, dim // 2), slice(dim // 2, dim)):
            torch.testing.assert_close(cos[0, 0, :, half], expected_cos, rtol=0, atol=1e-5)
        torch.testing.assert_close(sin[0, 0, :, dim // 2 :], expected_sin, rtol=0, atol=1e-5)
        torch.testing.assert_close(sin[0, 0, :, : dim // 2], -expected_sin, rtol=0, atol=1e-5)
        cos_n, sin_n = rope.tables(torch.arange(length)[None], dim, theta, scaling=scaling, pairing="neighbours")
        for j in (0, 1):
            torch.testing.assert_close(cos_n[0, 0, :, j::2], expected_cos, rtol=0, atol=1e-5)
        torch.testing.assert_close(sin_n[0, 0, :, 1::2], expected_sin, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pairing", ["halves", "neighbours"])
def test_scores_see_only_differences_of_positions(kind, pairing):
    q, k = torch.randn(2, 1, 2, 6, 16, dtype=torch.float64)
    positions = torch.tensor([[3, 0, 700, 41, 41, 699]])

    def scores(positions):
        # One late position keeps the length, and with it a dynamic table, the same.
        cos, sin = rope.tables(
            torch.cat([positions, torch.tensor([[4000]])], 1), 16, 10000.0, torch.float64,
            scaling=KINDS[kind][0], pairing=pairing,
        )  # fmt: skip
        turned = [rope.rotate(x, cos[:, :, :-1], sin[:, :, :-1], pairing) for x in (q, k)]
        return turned[0] @ turned[1].mT

    torch.testing.assert_close(scores(positions), scores(positions + 1234), rtol=1e-9, atol=1e-9)
    assert not torch.allclose(scores(positions), scores(positions * 2))


def test_the_pairings_are_one_function_up_to_the_order_of_features():
    x, positions = torch.randn(2, 3, 5, 8, dtype=torch.float64), torch.randint(0, 900, (2, 5))
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    halves = rope.rotate(x[..., order], *rope.tables(positions, 8, dtype=torch.float64))
    tables = rope.tables(positions, 8, dtype=torch.float64, pairing="neighbours")
    assert torch.equal(rope.rotate(x, *tables, "neighbours")[..., order], halves)


def test_neighbours_are_turned_as_complex_numbers():
    x, positions = torch.randn(1, 2, 4, 6, dtype=torch.float64), torch.tensor([[0, 5, 2, 77]])
    angles = positions[0, :, None] * plain(10000.0, 6, torch.float64, x.device)
    z = torch.view_as_complex(x.unflatten(-1, (3, 2))) * torch.polar(torch.ones_like(angles), angles)
    tables = rope.tables(positions, 6, dtype=torch.float64, pairing="neighbours")
    torch.testing.assert_close(rope.rotate(x, *tables, "neighbours"), torch.view_as_real(z).flatten(-2))


def frequencies(scaling, dim=64, length=1, theta=10000.0):
    return scaling.frequencies(theta, dim, torch.float64, torch.tensor(length))


def test_dynamic_changes_nothing_up_to_the_trained_length_and_divides_the_last_frequency_by_the_stretch():
    kept, scaling = plain(10000.0, 64, torch.float64, torch.device("cpu")), Dynamic(factor=2.0, trained=TRAINED)
    assert torch.equal(frequencies(scaling, length=TRAINED), kept)
    long = frequencies(scaling, length=4 * TRAINED)
    torch.testing.assert_close(kept[-1] / long[-1], torch.tensor(2.0 * 4 - 1, dtype=torch.float64))
    assert long[0] == kept[0]


@pytest.mark.parametrize("scaling", [Yarn(factor=8.0, trained=TRAINED), Llama3(factor=8.0, trained=TRAINED)])
def test_fast_turns_are_kept_and_slow_ones_divided(scaling):
    kept, new = plain(10000.0, 64, torch.float64, torch.device("cpu")), frequencies(scaling)
    turns = TRAINED * kept / (2 * math.pi)
    assert torch.equal(new[turns > 40], kept[turns > 40])
    torch.testing.assert_close(new[turns < 0.5], kept[turns < 0.5] / 8)
    assert (new <= kept).all() and (new >= kept / 8 * (1 - 1e-12)).all() and (new.diff() < 0).all()


def test_the_factor_on_scores():
    assert Yarn(factor=40.0, trained=4096).score_factor == 1
    scaling = Yarn(factor=40.0, trained=4096, mscale=1.0, mscale_all_dim=1.0)
    assert scaling.factor_on_heads == 1
    assert math.isclose(scaling.score_factor, (0.1 * math.log(40) + 1) ** 2)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Linear(factor=0), ["Linear(factor=0)", "factor is 0", "factor=4.0"]),
        (lambda: Dynamic(factor=0.5, trained=0), ["2 problems", "factor is 0.5", "trained is 0"]),
        (lambda: Yarn(factor=2.0, trained=8, beta_fast=1, beta_slow=2), ["beta_fast is 1", "beta_fast=32.0"]),
        (lambda: Llama3(factor=math.nan, trained=8, low=4, high=4), ["2 problems", "factor is nan", "high is 4"]),
    ],
)
def test_impossible_settings_are_named(make, words):
    with pytest.raises(ShapeError) as error:
        make()
    for word in [*words, "got:", "rule:", "fix:"]:
        assert word in str(error.value)
