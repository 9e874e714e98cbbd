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


def packed(lengths, numbers):
    """Documents and positions of a sequence in which documents of these lengths follow each other."""
    documents = torch.cat([torch.full((n,), i) for n, i in zip(lengths, numbers, strict=True)])
    return documents[None], torch.cat([torch.arange(n) for n in lengths])[None]


def masked(params, h, documents, positions):
    mask = attention.document_mask(documents, positions)
    return attention.attention(params, h, *rope.tables(positions, D, dtype=torch.float64), mask)


def test_packed_documents_equal_the_documents_one_by_one():
    params, lengths = random_params(6, 2, True), [4, 1, 6, 2]
    documents, positions = packed(lengths, [3, 0, 7, 1])
    h, weigh = torch.randn(2, 1, sum(lengths), E).double()

    def alone(p):
        rows = h.split(lengths, dim=1)
        each = [torch.arange(n)[None] for n in lengths]
        outs = [
            attention.attention(p, x, *rope.tables(at, D, dtype=torch.float64))
            for x, at in zip(rows, each, strict=True)
        ]
        return torch.cat(outs, 1)

    torch.testing.assert_close(masked(params, h, documents, positions), alone(params), rtol=1e-10, atol=1e-10)
    ours = torch.func.grad(lambda p: (masked(p, h, documents, positions) * weigh).sum())(params)
    expected = torch.func.grad(lambda p: (alone(p) * weigh).sum())(params)
    for name in params:
        torch.testing.assert_close(ours[name], expected[name], rtol=1e-9, atol=1e-9)


def test_documents_may_stand_in_any_order_of_tokens():
    params, (documents, positions) = random_params(4, 4, False), packed([5, 3], [0, 1])
    h, order = torch.randn(1, 8, E).double(), torch.randperm(8)
    shuffled = masked(params, h[:, order], documents[:, order], positions[:, order])
    torch.testing.assert_close(shuffled, masked(params, h, documents, positions)[:, order], rtol=1e-10, atol=1e-10)


def test_one_document_is_plain_causal_attention():
    params, h = random_params(4, 2, False), torch.randn(B, S, E).double()
    positions = torch.arange(S).expand(B, S)
    plain = attention.attention(params, h, *rope.tables(positions, D, dtype=torch.float64))
    torch.testing.assert_close(masked(params, h, torch.zeros_like(positions), positions), plain, rtol=1e-10, atol=1e-10)
