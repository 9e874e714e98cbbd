"""Multi-head latent attention: keys and values are read off one small latent vector a token."""

from typing import Any

import torch
from torch import Tensor

from fx_feather.param import Param
from fx_feather.trace import constrain

from . import cache, linear, norm, rope
from .attention import attend


def template(
    embed: int,
    heads: int,
    *,
    q_rank: int | None,
    kv_rank: int,
    plain_dim: int,
    rope_dim: int,
    value_dim: int,
    std: float | None = None,
    out_std: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Param]:
    """The projections down to the latents, up to the heads, and back to the stream.

    Args:
        embed: size of the residual stream.
        heads: number of heads.
        q_rank: size of the latent vector that queries are read off; None to project them directly.
        kv_rank: size of the latent vector that keys and values are read off.
        plain_dim: features of a query or key head without a position.
        rope_dim: features of a query head with one, turned by it; all heads share one such key.
        value_dim: features of a value head.
        std: standard deviation at the start of all but the last, without it 1 / sqrt(fan in).
        out_std: the same of the output projection.
        dtype: dtype of the weights.

    >>> sizes = {"kv_rank": 3, "plain_dim": 4, "rope_dim": 2, "value_dim": 5}
    >>> {name: p.shape for name, p in template(8, 2, q_rank=None, **sizes).items()}
    {'q': (8, 2, 6), 'kv_down': (8, 3), 'kv_norm': (3,), 'k_rope': (8, 2), 'k_up': (3, 2, 4), 'v_up': (3, 2, 5), 'o': (2, 5, 8)}
    """  # noqa: E501
    up, size = "latent heads head_dim", plain_dim + rope_dim
    if q_rank is None:
        params = {"q": linear.template("embed heads head_dim", (embed, heads, size), std=std, dtype=dtype)}
    else:
        params = {
            "q_down": linear.template("embed latent", (embed, q_rank), std=std, dtype=dtype),
            "q_norm": norm.rms_template(q_rank, "latent", dtype=dtype),
            "q_up": linear.template(up, (q_rank, heads, size), std=std, dtype=dtype),
        }
    return params | {
        "kv_down": linear.template("embed latent", (embed, kv_rank), std=std, dtype=dtype),
        "kv_norm": norm.rms_template(kv_rank, "latent", dtype=dtype),
        "k_rope": linear.template("embed head_dim", (embed, rope_dim), std=std, dtype=dtype),
        "k_up": linear.template(up, (kv_rank, heads, plain_dim), std=std, dtype=dtype),
        "v_up": linear.template(up, (kv_rank, heads, value_dim), std=std, dtype=dtype),
        "o": linear.template(
            "heads head_dim embed", (heads, value_dim, embed), inputs=2, std=out_std, dtype=dtype
        ),
    }  # fmt: skip


def mla(
    params: dict[str, Any],
    h: Tensor,
    cos: Tensor,
    sin: Tensor,
    mask: Tensor | None = None,
    *,
    score_factor: float = 1.0,
    eps: float = 1e-6,
) -> Tensor:
    """Each token reads those before it, by keys and values that are linear in a normed latent vector.

    A key has two parts: one is `k_up` times the latent, and could be moved to the query's side, so that only the latent
    need be kept of a token; a turn by positions between the two would prevent that. So positions are in a second part,
    read off the stream itself and shared by all heads. Scores add up both, over the root of their joint size.

    Rotary features are paired as neighbours, as the released weights are.

    Args:
        params: from `template`.
        h: `[batch, seq, embed]`, normalised.
        cos, sin: `[batch, 1, seq, rope_dim]`, from `rope.tables` with `pairing="neighbours"`.
        mask: see `fx_feather.nn.attention.attend`.
        score_factor: multiplies the scores, see `fx_feather.nn.rope_scaling.Yarn`.
        eps: of the norms of the latents.

    Returns:
        `[batch, seq, embed]`, to be added to the residual stream.

    Source: DeepSeek-V2, 2024, section 2.1 and appendix C.

    >>> from fx_feather.param import init
    >>> sizes = {"q_rank": 3, "kv_rank": 3, "plain_dim": 4, "rope_dim": 2, "value_dim": 5}
    >>> tables = rope.tables(torch.arange(6)[None], 2, pairing="neighbours")
    >>> mla(init(template(8, 2, **sizes)), torch.ones(1, 6, 8), *tables).shape
    torch.Size([1, 6, 8])
    """
    q, latent, k_turned = _projected(params, h, cos, sin, eps)
    values = _expanded(params, q, latent, k_turned, mask, score_factor)
    return _joined(params, values)


def _projected(
    params: dict[str, Any], h: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries `[batch, heads, seq, plain_dim + rope_dim]`; latents and the keys with positions, `[batch, seq, ...]`."""
    h = constrain(h, "batch seq embed")
    if "q" in params:
        q = torch.einsum("bse,ehd->bhsd", h, params["q"])
    else:
        q_latent = norm.rms_norm(params["q_norm"], linear.linear(params["q_down"], h), eps)
        q = torch.einsum("bsr,rhd->bhsd", q_latent, params["q_up"])
    q = constrain(q, "batch heads seq head_dim")
    latent = norm.rms_norm(params["kv_norm"], linear.linear(params["kv_down"], h), eps)
    plain = params["k_up"].shape[-1]
    q_turned = rope.rotate(q[..., plain:], cos, sin, "neighbours")
    k_turned = rope.rotate(linear.linear(params["k_rope"], h).unsqueeze(1), cos, sin, "neighbours")
    return torch.cat([q[..., :plain], q_turned], dim=-1), latent, k_turned.squeeze(1)


def _expanded(
    params: dict[str, Any], q: Tensor, latent: Tensor, k_turned: Tensor, mask: Tensor | None, score_factor: float
) -> Tensor:
    """What each head reads, from keys and values of its own."""
    # Where the queries of a sequence are split, its latents are gathered, which are shorter than keys and values.
    latent, k_turned = constrain(latent, "batch kv_seq latent"), constrain(k_turned, "batch kv_seq _")
    k = constrain(torch.einsum("bsr,rhd->bhsd", latent, params["k_up"]), "batch heads kv_seq head_dim")
    v = constrain(torch.einsum("bsr,rhd->bhsd", latent, params["v_up"]), "batch heads kv_seq head_dim")
    k = torch.cat([k, k_turned.unsqueeze(1).expand(*k.shape[:-1], -1)], dim=-1)
    return attend(q, k, v, mask, scale=score_factor / q.shape[-1] ** 0.5)


def _absorbed(
    params: dict[str, Any], q: Tensor, latent: Tensor, k_turned: Tensor, mask: Tensor, score_factor: float
) -> Tensor:
    """What each head reads, from the latents themselves: `<q, k_up c> = <k_up^T q, c>`, and `v_up` acts on their mean.

    A key is then as long as a latent, which costs more than a head's own where queries are many, but nothing has to be
    computed of the tokens before.
    """
    plain = params["k_up"].shape[-1]
    moved = constrain(torch.einsum("bhsd,rhd->bhsr", q[..., :plain], params["k_up"]), "batch heads seq latent")
    keys = torch.cat([latent, k_turned], dim=-1).unsqueeze(1)
    queries = torch.cat([moved, q[..., plain:]], dim=-1)
    means = attend(queries, keys, latent.unsqueeze(1), mask, scale=score_factor / q.shape[-1] ** 0.5)
    return constrain(torch.einsum("bhsr,rhd->bhsd", means, params["v_up"]), "batch heads seq head_dim")


def _joined(params: dict[str, Any], values: Tensor) -> Tensor:
    out = torch.einsum("bhsd,hde->bse", values, params["o"])
    return constrain(out, "batch residual_seq embed")


def cached(
    params: dict[str, Any],
    h: Tensor,
    cos: Tensor,
    sin: Tensor,
    where: cache.Places,
    kept: cache.Kept | None = None,
    *,
    score_factor: float = 1.0,
    eps: float = 1e-6,
) -> tuple[Tensor, cache.Kept]:
    """`mla` of further tokens of texts whose latents are kept.

    Where texts begin their tokens read each other by keys and values of each head. Later, few tokens read many, and
    `k_up` and `v_up` move to the side of the queries, so that what is kept is read as it is.

    Args:
        params: from `template`.
        h: `[batch, seq, embed]`, normalised.
        cos, sin: `[batch, 1, seq, rope_dim]`, see `mla`.
        where: from `cache.places`.
        kept: like `cache.latent_template`, as tensors; None where the texts begin.
        score_factor: see `mla`.
        eps: of the norms of the latents.

    Returns:
        `[batch, seq, embed]`, and what is kept now.

    Source: DeepSeek-V2, 2024, section 2.1.2 and appendix C.

    >>> from fx_feather.param import init
    >>> sizes = {"q_rank": 3, "kv_rank": 3, "plain_dim": 4, "rope_dim": 2, "value_dim": 5}
    >>> positions = torch.arange(6)[None]
    >>> tables, where = rope.tables(positions, 2, pairing="neighbours"), cache.places(positions, length=8, new=True)
    >>> out, kept = cached(init(template(8, 2, **sizes)), torch.ones(1, 6, 8), *tables, where)
    >>> out.shape, kept["latent"].shape
    (torch.Size([1, 6, 8]), torch.Size([1, 8, 3]))
    """
    q, latent, k_turned = _projected(params, h, cos, sin, eps)
    dims = {"latent": "batch _ latent", "k_rope": "batch _ head_dim"}
    now = cache.keep(kept, {"latent": latent, "k_rope": k_turned}, where, dims)
    if kept is None:
        values = _expanded(params, q, latent, k_turned, where["mask"], score_factor)
    else:
        read = {name: x.to(q.dtype) for name, x in now.items()}
        values = _absorbed(params, q, read["latent"], read["k_rope"], where["mask"], score_factor)
    return _joined(params, values), now
