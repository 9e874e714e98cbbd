"""Causal self-attention: with grouped queries and rotary positions, or plain with biases; within documents."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fx_feather.param import Param, zeros
from fx_feather.trace import constrain

from . import cache, linear, norm, rope


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


def document_mask(documents: Tensor, positions: Tensor) -> Tensor:
    """Which keys each query reads in sequences of several documents: those of its own, at no later position.

    Order is told by positions rather than by places, so that the tokens of a sequence may stand in any order.

    Args:
        documents: int`[batch, seq]`, equal for the tokens of one document.
        positions: int`[batch, seq]`, from 0 on in each document.

    Returns:
        bool`[batch, 1, seq, seq]`, rows for queries and columns for keys; the 1 stands for heads.

    >>> document_mask(torch.tensor([[7, 7, 3]]), torch.tensor([[0, 1, 0]])).int()
    tensor([[[[1, 0, 0],
              [1, 1, 0],
              [0, 0, 1]]]], dtype=torch.int32)
    """
    same = documents.unsqueeze(2) == constrain(documents, "batch kv_seq").unsqueeze(1)
    before = constrain(positions, "batch kv_seq").unsqueeze(1) <= positions.unsqueeze(2)
    return constrain((same & before).unsqueeze(1), "batch _ seq kv_seq")


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, scale: float | None = None) -> Tensor:
    """The mean of the values that each query reads, weighted by the softmax of its scores.

    Query head `i` reads key and value head `i // (heads / kv_heads)` (Ainslie et al., GQA, 2023).

    Args:
        q: `[batch, heads, seq, head_dim]`.
        k: `[batch, kv_heads, seq, head_dim]`.
        v: `[batch, kv_heads, seq, value_dim]`.
        mask: bool`[batch, 1, seq, seq]`, such as `document_mask`; without it each token reads itself and those before
            it in the sequence.
        scale: multiplies the scores, 1 / sqrt(head_dim) by default.

    Returns:
        `[batch, heads, seq, value_dim]`.

    Source: Vaswani et al., Attention Is All You Need, 2017, eq. 1.

    >>> one = torch.ones(1, 1, 2, 1)
    >>> attend(one, one, torch.tensor([[[[4.0], [2.0]]]])).flatten()
    tensor([4., 3.])
    """
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def attention(
    params: dict[str, Any], h: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None, *, eps: float = 1e-5
) -> Tensor:
    """Each token reads from itself and the tokens before it in the sequence, or in its document.

    Where the template has q/k-norms they act on each head alone, before the turn, which keeps lengths (Qwen3, 2025).

    Args:
        params: from `template`.
        h: `[batch, seq, embed]`, normalised.
        cos, sin: `[batch, 1, seq, head_dim]`, from `rope.tables`.
        mask: see `attend`.
        eps: of the q/k-norms.

    Returns:
        `[batch, seq, embed]`, to be added to the residual stream.

    >>> cos, sin = rope.tables(torch.tensor([[0, 1]]), head_dim=2)
    >>> one = torch.ones(1, 1, 2)
    >>> attention({"q": one, "k": one, "v": one, "o": one.mT}, torch.tensor([[[4.0], [4.0]]]), cos, sin)
    tensor([[[8.],
             [8.]]])
    """
    q, k, v = _projected(params, h, cos, sin, eps)
    # Where the queries of a sequence are split, its keys and values are gathered.
    k, v = (constrain(x, "batch kv_heads kv_seq head_dim") for x in (k, v))
    return _joined(params, attend(q, k, v, mask))


def _projected(
    params: dict[str, Any], h: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Turned queries and keys, and values, `[batch, heads, seq, head_dim]` each."""
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
    return rope.rotate(q, cos, sin), rope.rotate(k, cos, sin), v


def _joined(params: dict[str, Any], values: Tensor) -> Tensor:
    """What all heads read, back in the stream."""
    out = torch.einsum("bhsk,hke->bse", values, params["o"])
    return constrain(out, "batch residual_seq embed")


def cached(
    params: dict[str, Any],
    h: Tensor,
    cos: Tensor,
    sin: Tensor,
    where: cache.Places,
    kept: cache.Kept | None = None,
    *,
    eps: float = 1e-5,
) -> tuple[Tensor, cache.Kept]:
    """`attention` of further tokens of texts whose keys and values are kept.

    Args:
        params: from `template`.
        h: `[batch, seq, embed]`, normalised.
        cos, sin: `[batch, 1, seq, head_dim]`, from `rope.tables`.
        where: from `cache.places`.
        kept: like `cache.heads_template`, as tensors; None where the texts begin.
        eps: of the q/k-norms.

    Returns:
        `[batch, seq, embed]`, and what is kept now.

    >>> cos, sin = rope.tables(torch.tensor([[0]]), head_dim=2)
    >>> one, where = torch.ones(1, 1, 2), cache.places(torch.tensor([[0]]), length=3, new=True)
    >>> out, kept = cached({"q": one, "k": one, "v": one, "o": one.mT}, torch.tensor([[[4.0]]]), cos, sin, where)
    >>> out, kept["v"][..., 0]
    (tensor([[[8.]]]), tensor([[[4., 0., 0.]]]))
    """
    q, k, v = _projected(params, h, cos, sin, eps)
    values, kept = _read(q, {"k": k, "v": v}, where, kept, "kv_heads")
    return _joined(params, values), kept


def _read(
    q: Tensor, new: cache.Kept, where: cache.Places, kept: cache.Kept | None, heads: str
) -> tuple[Tensor, cache.Kept]:
    """What queries read of the new tokens where texts begin, and else of all that is kept, the new tokens too."""
    now = cache.keep(kept, new, where, dict.fromkeys("kv", f"batch {heads} _ head_dim"))
    read = new if kept is None else {name: x.to(q.dtype) for name, x in now.items()}
    return attend(q, read["k"], read["v"], where["mask"]), now


def biased_template(
    embed: int,
    heads: int,
    head_dim: int,
    *,
    std: float | None = None,
    out_std: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Param]:
    """The projections to queries, keys and values and back, each with a bias; arguments as for `template`.

    >>> {name: p.dims for name, p in biased_template(8, heads=4, head_dim=2).items() if "bias" in name}["q_bias"]
    'heads head_dim'
    """
    # Every query head has a key and a value head of its own, so that all are named and split alike.
    shape = (embed, heads, head_dim)
    params = {name: linear.template("embed heads head_dim", shape, std=std, dtype=dtype) for name in "qkv"}
    params |= {f"{name}_bias": Param("heads head_dim", shape[1:], init=zeros(), dtype=dtype) for name in "qkv"}
    return params | {
        "o": linear.template("heads head_dim embed", (heads, head_dim, embed), inputs=2, std=out_std, dtype=dtype),
        "o_bias": Param("embed", (embed,), init=zeros(), dtype=dtype),
    }


def biased(params: dict[str, Any], h: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention of as many key and value heads as query heads, with biases and without positions (GPT-2).

    Args:
        params: from `biased_template`.
        h: `[batch, seq, embed]`, normalised.
        mask: see `attend`.

    Returns:
        `[batch, seq, embed]`, to be added to the residual stream.

    >>> from fx_feather.param import init
    >>> biased(init(biased_template(8, heads=4, head_dim=2)), torch.ones(1, 3, 8)).shape
    torch.Size([1, 3, 8])
    """
    q, k, v = _biased_projected(params, h)
    k, v = (constrain(x, "batch heads kv_seq head_dim") for x in (k, v))
    return _biased_joined(params, attend(q, k, v, mask))


def _biased_projected(params: dict[str, Any], h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    h = constrain(h, "batch seq embed")

    def project(name: str) -> Tensor:
        out = torch.einsum("bse,ehd->bhsd", h, params[name]) + params[f"{name}_bias"].unsqueeze(1)
        return constrain(out, "batch heads seq head_dim")

    return project("q"), project("k"), project("v")


def _biased_joined(params: dict[str, Any], values: Tensor) -> Tensor:
    return _joined(params, values) + params["o_bias"]


def biased_cached(
    params: dict[str, Any], h: Tensor, where: cache.Places, kept: cache.Kept | None = None
) -> tuple[Tensor, cache.Kept]:
    """`biased` of further tokens of texts whose keys and values are kept; see `cached`.

    >>> from fx_feather.param import init
    >>> where = cache.places(torch.arange(3)[None], length=5, new=True)
    >>> out, kept = biased_cached(init(biased_template(8, heads=4, head_dim=2)), torch.ones(1, 3, 8), where)
    >>> out.shape, kept["k"].shape
    (torch.Size([1, 3, 8]), torch.Size([1, 4, 5, 2]))
    """
    q, k, v = _biased_projected(params, h)
    values, kept = _read(q, {"k": k, "v": v}, where, kept, "heads")
    return _biased_joined(params, values), kept
