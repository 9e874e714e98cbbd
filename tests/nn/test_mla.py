"""Latent attention against its definition, and in the form in which only the latents need be kept."""

import math

import pytest
import torch

from fx_feather.nn import mla, norm, rope
from fx_feather.param import init

B, S, E, H = 2, 5, 8, 3
SIZES = {"kv_rank": 4, "plain_dim": 6, "rope_dim": 4, "value_dim": 5}


def setting(q_rank):
    torch.manual_seed(0)
    params = init(mla.template(E, H, q_rank=q_rank, **SIZES, dtype=torch.float64))
    params = {name: p + 0.1 * torch.randn(p.shape).double() for name, p in params.items()}
    positions = torch.randint(0, 50, (B, S))
    return params, torch.randn(B, S, E).double(), positions


def absorbed(params, h, positions, score_factor):
    """Queries are moved into the space of latents, and values out of it at the end; nothing per head is kept."""
    tables = rope.tables(positions, 4, dtype=torch.float64, pairing="neighbours")
    if "q" in params:
        q = torch.einsum("bse,ehd->bhsd", h, params["q"])
    else:
        q = torch.einsum("bsr,rhd->bhsd", norm.rms_norm(params["q_norm"], h @ params["q_down"], 1e-6), params["q_up"])
    latent = norm.rms_norm(params["kv_norm"], h @ params["kv_down"], 1e-6)
    shared = rope.rotate((h @ params["k_rope"])[:, None], *tables, "neighbours")[:, 0]
    turned = rope.rotate(q[..., 6:], *tables, "neighbours")
    moved = torch.einsum("bhsd,rhd->bhsr", q[..., :6], params["k_up"])
    scores = torch.einsum("bhsr,btr->bhst", moved, latent) + torch.einsum("bhsd,btd->bhst", turned, shared)
    scores = scores * score_factor / math.sqrt(10) + torch.full((S, S), -math.inf).triu(1)
    read = torch.einsum("bhst,btr->bhsr", scores.softmax(-1), latent)
    return torch.einsum("bhsr,rhd,hde->bse", read, params["v_up"], params["o"])


@pytest.mark.parametrize("q_rank", [None, 7])
def test_it_equals_its_absorbed_form(q_rank):
    params, h, positions = setting(q_rank)
    tables = rope.tables(positions, 4, dtype=torch.float64, pairing="neighbours")

    def ours(p):
        return mla.mla(p, h, *tables, score_factor=1.3)

    out, expected = ours(params), absorbed(params, h, positions, 1.3)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    ct = torch.randn_like(out)
    grads = torch.func.grad(lambda p: (ours(p) * ct).sum())(params)
    wanted = torch.func.grad(lambda p: (absorbed(p, h, positions, 1.3) * ct).sum())(params)
    for name in params:
        assert grads[name].norm() > 0
        torch.testing.assert_close(grads[name], wanted[name], rtol=1e-9, atol=1e-9)


def test_template_names_latents_and_heads():
    template = mla.template(E, H, q_rank=7, **SIZES)
    assert {name: (p.dims, p.shape) for name, p in template.items()} == {
        "q_down": ("embed latent", (E, 7)),
        "q_norm": ("latent", (7,)),
        "q_up": ("latent heads head_dim", (7, H, 10)),
        "kv_down": ("embed latent", (E, 4)),
        "kv_norm": ("latent", (4,)),
        "k_rope": ("embed head_dim", (E, 4)),
        "k_up": ("latent heads head_dim", (4, H, 6)),
        "v_up": ("latent heads head_dim", (4, H, 5)),
        "o": ("heads head_dim embed", (H, 5, E)),
    }
    assert "q" in mla.template(E, H, q_rank=None, **SIZES)
