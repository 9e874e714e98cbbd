"""Grouped-query attention against a loop over heads and queries."""

import pytest
import torch

from fx_feather.nn import attention, rope
from fx_feather.param import init

B, S, E, D = 2, 5, 12, 4


def reference(params, h, positions, eps=1e-5):
    """Softmax attention a head at a time, with each kv head repeated for its queries."""
    q, k, v = (torch.tensordot(h, params[n], dims=1).transpose(1, 2) for n in "qkv")
    if "q_norm" in params:
        q, k = (
            x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * w
            for x, w in ((q, params["q_norm"]), (k, params["k_norm"]))
        )
    cos, sin = rope.tables(positions, D, 10000.0, torch.float64)
    q, k = rope.rotate(q, cos, sin), rope.rotate(k, cos, sin)
    group = q.shape[1] // k.shape[1]
    out = torch.zeros(B, S, E, dtype=torch.float64)
    for head in range(q.shape[1]):
        kv = head // group
        for i in range(S):
            scores = (k[:, kv, : i + 1] @ q[:, head, i, :, None]).squeeze(-1) / D**0.5
            value = (scores.softmax(-1)[..., None] * v[:, kv, : i + 1]).sum(1)
            out[:, i] += value @ params["o"][head]
    return out


def random_params(heads, kv_heads, qk_norm):
    params = init(attention.template(E, heads, kv_heads, D, qk_norm=qk_norm, dtype=torch.float64))
    return {name: p + 0.1 * torch.randn(p.shape).double() for name, p in params.items()}


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 2), (3, 1)])
def test_attention_equals_a_loop_over_heads(heads, kv_heads, qk_norm):
    params = random_params(heads, kv_heads, qk_norm)
    h, positions = torch.randn(B, S, E).double(), torch.randint(0, 50, (B, S))
    out = attention.attention(params, h, *rope.tables(positions, D, dtype=torch.float64))
    torch.testing.assert_close(out, reference(params, h, positions), rtol=1e-10, atol=1e-10)


def test_a_kv_head_gathers_the_gradients_of_all_its_queries():
    params = random_params(6, 2, True)
    h, positions = torch.randn(B, S, E).double(), torch.arange(S).expand(B, S)
    tables = rope.tables(positions, D, dtype=torch.float64)
    weigh = torch.randn(B, S, E).double()
    ours = torch.func.grad(lambda p: (attention.attention(p, h, *tables) * weigh).sum())(params)
    expected = torch.func.grad(lambda p: (reference(p, h, positions) * weigh).sum())(params)
    for name in params:
        torch.testing.assert_close(ours[name], expected[name], rtol=1e-9, atol=1e-9)


def test_template_names_heads_as_dims_of_their_own():
    template = attention.template(E, 6, 2, D, qk_norm=True)
    assert {name: p.dims for name, p in template.items()} == {
        "q": "embed heads head_dim",
        "k": "embed kv_heads head_dim",
        "v": "embed kv_heads head_dim",
        "o": "heads head_dim embed",
        "q_norm": "head_dim",
        "k_norm": "head_dim",
    }
    assert tuple(template["o"].shape) == (6, D, E)
    assert set(attention.template(E, 6, 2, D)) == {"q", "k", "v", "o"}
