"""Causal self-attention with grouped queries, rotary positions and optional norms of queries and keys."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fx_feather.param import Param
from fx_feather.trace import constrain

from . import linear, norm, rope


def template(
    embed: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    qk_norm: bool = False,
    std: float | None = None,
    out_std: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Param]:
    """The projections to queries, keys and values and back, and the scales of the q/k-norms where asked for.

    Heads are a dim of their own in each weight, so that a layout splits whole heads and no view merges a split
    dim with another one.

    Args:
        embed: size of the residual stream.
        heads: number of query heads, a multiple of `kv_heads`.
        kv_heads: number of key and value heads.
        head_dim: size of one head.
        qk_norm: normalise each query and key before they are turned.
        std: standard deviation of q, k and v at the start, without it 1 / sqrt(fan in).
        out_std: the same of the output projection.
        dtype: dtype of the weights.

    >>> {name: p.shape for name, p in template(8, heads=4, kv_heads=2, head_dim=2).items()}
    {'q': (8, 4, 2), 'k': (8, 2, 2), 'v': (8, 2, 2), 'o': (4, 2, 8)}
    """
    params = {
        "q": linear.template("embed heads head_dim", (embed, heads, head_dim), std=std, dtype=dtype),
        "k": linear.template("embed kv_heads head_dim", (embed, kv_heads, head_dim), std=std, dtype=dtype),
        "v": linear.template("embed kv_heads head_dim", (embed, kv_heads, head_dim), std=std, dtype=dtype),
        "o": linear.template("heads head_dim embed", (heads, head_dim, embed), inputs=2, std=out_std, dtype=dtype),
    }
    if qk_norm:
        params["q_norm"] = norm.rms_template(head_dim, "head_dim", dtype=dtype)
        params["k_norm"] = norm.rms_template(head_dim, "head_dim", dtype=dtype)
    return params


def attention(params: dict[str, Any], h: Tensor, cos: Tensor, sin: Tensor, *, eps: float = 1e-5) -> Tensor:
    """Each token reads from itself and the tokens before it in the sequence.

    Query head `i` reads key and value head `i // (heads / kv_heads)` (Ainslie et al., GQA, 2023). Where the
    template has q/k-norms they act on each head alone, before the turn, which keeps lengths (Qwen3, 2025).

    Args:
        params: from `template`.
        h: `[batch, seq, embed]`, normalised.
        cos, sin: `[batch, 1, seq, head_dim]`, from `rope.tables`.
        eps: of the q/k-norms.

    Returns:
        `[batch, seq, embed]`, to be added to the residual stream.

    Source: Vaswani et al., Attention Is All You Need, 2017, eq. 1.

    >>> cos, sin = rope.tables(torch.tensor([[0, 1]]), head_dim=2)
    >>> one = torch.ones(1, 1, 2)
    >>> attention({"q": one, "k": one, "v": one, "o": one.mT}, torch.tensor([[[4.0], [4.0]]]), cos, sin)
    tensor([[[8.],
             [8.]]])
    """
    h = constrain(h, "batch seq embed")
    # Heads come out before seq, where the attention operator wants them, so nothing is transposed afterwards.
    q = torch.einsum("bse,ehd->bhsd", h, params["q"])
    k = torch.einsum("bse,ekd->bksd", h, params["k"])
    v = torch.einsum("bse,ekd->bksd", h, params["v"])
    q = constrain(q, "batch heads seq head_dim")
    k = constrain(k, "batch kv_heads seq head_dim")
    v = constrain(v, "batch kv_heads seq head_dim")
    if "q_norm" in params:
        q = norm.rms_norm(params["q_norm"], q, eps)
        k = norm.rms_norm(params["k_norm"], k, eps)
    q, k = rope.rotate(q, cos, sin), rope.rotate(k, cos, sin)
    grouped = q.shape[1] != k.shape[1]
    values = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    out = torch.einsum("bhsd,hde->bse", values, params["o"])
    return constrain(out, "batch residual_seq embed")
