"""The linear map and the embedding against plain arithmetic."""

import math

import torch

from fx_feather.nn import embed, linear
from fx_feather.param import init


def test_linear_sums_over_the_first_dim_of_its_weight():
    x, w, b = torch.randn(2, 3, 4).double(), torch.randn(4, 5).double(), torch.randn(5).double()
    expected = (x[..., :, None] * w).sum(-2)
    torch.testing.assert_close(linear.linear(w, x), expected)
    torch.testing.assert_close(linear.linear(w, x, b), expected + b)


def test_linear_starts_with_a_variance_of_one_over_fan_in():
    one = init(linear.template("embed mlp", (256, 300), dtype=torch.float64))
    two = init(linear.template("heads head_dim embed", (8, 32, 300), inputs=2, dtype=torch.float64))
    for weight in (one, two):
        assert math.isclose(weight.std().item(), 1 / 16, rel_tol=0.02)
    assert math.isclose(init(linear.template("embed mlp", (256, 300), std=0.5)).std().item(), 0.5, rel_tol=0.02)


def test_embed_takes_rows_and_unembed_is_its_transpose():
    table = torch.randn(7, 4).double()
    tokens = torch.tensor([[0, 6, 3], [3, 3, 1]])
    x = embed.embed(table, tokens)
    torch.testing.assert_close(x, torch.nn.functional.one_hot(tokens, 7).double() @ table)
    torch.testing.assert_close(embed.unembed(table, x), x @ table.T)


def test_embed_template_names_its_dims():
    p = embed.template(7, 4, dtype=torch.bfloat16)
    assert (p.dims, tuple(p.shape), p.dtype) == ("vocab embed", (7, 4), torch.bfloat16)
