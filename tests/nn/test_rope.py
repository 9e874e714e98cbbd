"""Rotary positions: what defines them (scores see differences only), and their equation."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from fx_feather.nn import rope


def turn(x, positions, theta):
    """RoFormer's turn with complex numbers, on pairs taken by halves."""
    half = x.shape[-1] // 2
    frequencies = torch.tensor([theta ** (-2 * j / (2 * half)) for j in range(half)], dtype=torch.float64)
    angles = positions[:, None, :, None].double() * frequencies
    z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([z.real, z.imag], -1)


def turned(x, positions, theta=10000.0):
    return rope.rotate(x, *rope.tables(positions, x.shape[-1], theta, torch.float64))


@given(st.integers(1, 8), st.integers(0, 2**31), st.sampled_from([100.0, 10000.0, 1e6]))
def test_rotate_equals_the_complex_turn(half, seed, theta):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 3, 5, 2 * half, generator=g, dtype=torch.float64)
    positions = torch.randint(0, 10000, (2, 5), generator=g)
    torch.testing.assert_close(turned(x, positions, theta), turn(x, positions, theta), rtol=1e-9, atol=1e-9)


@given(st.integers(1, 8), st.integers(0, 2**31), st.integers(-5000, 5000))
def test_scores_see_only_differences_of_positions(half, seed, shift):
    g = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, 1, 2, 4, 2 * half, generator=g, dtype=torch.float64)
    positions = torch.randint(0, 1000, (1, 4), generator=g)
    scores = turned(q, positions) @ turned(k, positions).mT
    shifted = turned(q, positions + shift) @ turned(k, positions + shift).mT
    torch.testing.assert_close(scores, shifted, rtol=1e-9, atol=1e-9)


def test_a_turn_keeps_lengths_and_position_zero_turns_nothing():
    x = torch.randn(1, 2, 3, 8).double()
    torch.testing.assert_close(turned(x, torch.tensor([[0, 7, 1000]])).norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(turned(x, torch.zeros(1, 3, dtype=torch.long)), x)


def test_each_sequence_has_its_own_positions():
    x = torch.randn(1, 2, 3, 4).double().expand(2, 2, 3, 4)
    positions = torch.tensor([[0, 1, 2], [5, 0, 1]])
    both = turned(x, positions)
    for row in range(2):
        torch.testing.assert_close(both[row : row + 1], turned(x[:1], positions[row : row + 1]))


def test_bf16_heads_are_turned_in_the_precision_of_the_tables():
    x = torch.randn(1, 1, 4, 8).bfloat16()
    positions = torch.tensor([[1, 257, 4001, 30001]])
    out = rope.rotate(x, *rope.tables(positions, 8))
    exact = turn(x.double(), positions, 10000.0)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=5e-3)
