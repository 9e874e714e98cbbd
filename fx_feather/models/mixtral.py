"""Mixtral: Llama's decoder, with a mixture of experts in place of every feed-forward block."""

import dataclasses
import functools as ft
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fx_feather.nn import attention, balance, cache, embed, mlp, moe, norm, router
from fx_feather.nn.balance import Penalties, Statistics
from fx_feather.nn.rope_scaling import Scaling
from fx_feather.param import Param
from fx_feather.trace import block, constrain

from . import decoder
from .checks import Problems, fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtralConfig:
    """Sizes and constants of a Mixtral-style decoder.

    Args:
        vocab: number of tokens.
        layers: number of blocks.
        embed: size of the residual stream.
        heads: number of query heads.
        kv_heads: number of key and value heads, a divisor of `heads`.
        expert_mlp: size of an expert's hidden layer.
        experts: number of experts.
        top_k: experts a token.
        dense: numbers of the layers, from 0, that have one feed-forward block in place of experts.
        mlp: size of the hidden layer of those.
        head_dim: size of one head, even; without it `embed / heads`.
        rope_theta: base of the rotary wavelengths.
        rope_scaling: for texts longer than those of training, from `fx_feather.nn.rope_scaling`.
        norm_eps: added to the mean square in every norm.
        qk_norm: normalise queries and keys.
        normalize: the weights of a token's experts sum to 1.
        capacity_factor: how many times its even share of a sequence an expert takes; without it, all that come.
        penalties: what routers add to the loss.
        tied: the head is the embedding's table.
        dtype: dtype of the parameters.
        init_std: standard deviation of the weights at the start.

    Raises:
        ShapeError: sizes that make no model, all of them at once.

    Source: Jiang et al., Mixtral of Experts, 2024, section 2.

    >>> MixtralConfig(vocab=256, layers=2, embed=64, heads=4, kv_heads=2, expert_mlp=128, experts=8).top_k
    2
    """

    vocab: int
    layers: int
    embed: int
    heads: int
    kv_heads: int
    expert_mlp: int
    experts: int
    top_k: int = 2
    dense: tuple[int, ...] = ()
    mlp: int | None = None
    head_dim: int | None = None
    rope_theta: float = 1000000.0
    rope_scaling: Scaling | None = None
    norm_eps: float = 1e-5
    qk_norm: bool = False
    normalize: bool = True
    capacity_factor: float | None = None
    penalties: Penalties = balance.NONE
    tied: bool = False
    dtype: torch.dtype = torch.float32
    init_std: float = 0.02

    def __post_init__(self) -> None:
        problems = Problems(self)
        problems.sizes("vocab layers embed heads kv_heads expert_mlp experts top_k")
        problems.sizes("head_dim", optional=True)
        problems.sizes("mlp", optional=not self.dense)
        if not {*self.dense} <= {*range(self.layers)} or len({*self.dense}) != len(self.dense):
            problems.offend(
                "dense layers",
                f"layers {sorted({*self.dense} - {*range(self.layers)}) or 'named twice'} are not there once",
                "dense layers are some of all layers, which are numbered from 0",
                f"dense={tuple(sorted({*self.dense} & {*range(self.layers)}))}",
            )
        problems.constants("rope_theta norm_eps init_std")
        problems.constants("capacity_factor", optional=True)
        problems.dtype()
        problems.heads()
        problems.at_most("top_k", "experts", "a token goes to different experts")
        problems.raise_all()

    @property
    def head_size(self) -> int:
        """Size of one head."""
        return self.embed // self.heads if self.head_dim is None else self.head_dim


def template(cfg: MixtralConfig) -> dict[str, Any]:
    """The parameters of a model, as a pytree of `Param`.

    The projections of a layer that write to the residual stream start smaller by sqrt(2 layers), see
    `fx_feather.models.llama.template`.

    >>> cfg = MixtralConfig(vocab=256, layers=2, embed=64, heads=4, kv_heads=2, expert_mlp=128, experts=8)
    >>> template(cfg)["layers"][1]["moe"]["experts"]["up"].shape
    (8, 64, 128)
    """
    starts: dict[str, Any] = {
        "std": cfg.init_std,
        "out_std": cfg.init_std / math.sqrt(2 * cfg.layers),
        "dtype": cfg.dtype,
    }

    def one_layer(i: int) -> dict[str, Any]:
        params = {
            "attention_norm": norm.rms_template(cfg.embed, dtype=cfg.dtype),
            "attention": attention.template(
                cfg.embed, cfg.heads, cfg.kv_heads, cfg.head_size, qk_norm=cfg.qk_norm, **starts
            ),
            "mlp_norm": norm.rms_template(cfg.embed, dtype=cfg.dtype),
        }
        if i in cfg.dense:
            return params | {"mlp": mlp.template(cfg.embed, cfg.mlp or 0, **starts)}
        return params | {
            "moe": {
                "router": router.template(cfg.embed, cfg.experts, std=cfg.init_std, dtype=cfg.dtype),
                "experts": moe.template(cfg.embed, cfg.expert_mlp, cfg.experts, **starts),
            }
        }

    params: dict[str, Any] = {
        "embed": embed.template(cfg.vocab, cfg.embed, std=cfg.init_std, dtype=cfg.dtype),
        "layers": [one_layer(i) for i in range(cfg.layers)],
        "norm": norm.rms_template(cfg.embed, dtype=cfg.dtype),
    }
    if not cfg.tied:
        params["head"] = embed.template(cfg.vocab, cfg.embed, std=cfg.init_std, dtype=cfg.dtype)
    return params


def feed(cfg: MixtralConfig, p: dict[str, Any], h: Tensor) -> tuple[Tensor, Statistics]:
    """The mixture of experts of one layer: the best `top_k` by softmax of all, and what the router did."""
    h = constrain(h, "batch seq embed")
    logits = router.logits(p["router"]["weight"], h)
    scores = logits.softmax(-1)
    weights, index = router.top(scores, cfg.top_k)
    if cfg.normalize:
        weights = router.normalized(weights)
    out = moe.mixture(p["experts"], h, weights, index, cfg.capacity_factor)
    return out, balance.statistics(cfg.penalties, logits, scores, index)


def layer(
    cfg: MixtralConfig, p: dict[str, Any], x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Statistics]:
    """One block; arguments as for `fx_feather.models.llama.layer`."""
    x = _attended(cfg, p, x, cos, sin, mask)
    out, statistics = feed(cfg, p["moe"], norm.rms_norm(p["mlp_norm"], x, cfg.norm_eps))
    return x + out, statistics


def dense_layer(
    cfg: MixtralConfig, p: dict[str, Any], x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None
) -> Tensor:
    """One block with one feed-forward block; arguments as for `fx_feather.models.llama.layer`."""
    x = _attended(cfg, p, x, cos, sin, mask)
    return x + mlp.swiglu(p["mlp"], norm.rms_norm(p["mlp_norm"], x, cfg.norm_eps))


def _attended(
    cfg: MixtralConfig, p: dict[str, Any], x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None
) -> Tensor:
    h = norm.rms_norm(p["attention_norm"], x, cfg.norm_eps)
    return x + attention.attention(p["attention"], h, cos, sin, mask, eps=cfg.norm_eps)


def hidden(
    cfg: MixtralConfig, params: dict[str, Any], tokens: Tensor, positions: Tensor, documents: Tensor | None = None
) -> tuple[Tensor, list[Statistics]]:
    """The normed stream after the last block, and what each router did; arguments as for `forward`."""
    args = decoder.turns(params, positions, documents, cfg.head_size, cfg.rope_theta, cfg.rope_scaling)
    run, dense = block(ft.partial(layer, cfg), name="layer"), block(ft.partial(dense_layer, cfg), name="dense_layer")
    layers = [dense if i in cfg.dense else run for i in range(cfg.layers)]
    return decoder.hidden(params, tokens, layers, args, cfg.norm_eps)


def forward(
    cfg: MixtralConfig, params: dict[str, Any], tokens: Tensor, positions: Tensor, documents: Tensor | None = None
) -> Tensor:
    """Logits of the next token at each place of each sequence; see `fx_feather.models.llama.forward`."""
    return decoder.logits(params, hidden(cfg, params, tokens, positions, documents)[0])


def cache_template(
    cfg: MixtralConfig, batch: int, length: int, dtype: torch.dtype | None = None
) -> list[dict[str, Param]]:
    """A cache of keys and values, as a pytree of `Param`; see `fx_feather.models.llama.cache_template`."""
    one = cache.heads_template(batch, cfg.kv_heads, length, cfg.head_size, dtype=dtype or cfg.dtype)
    return [one] * cfg.layers


def extend_layer(
    cfg: MixtralConfig,
    p: dict[str, Any],
    x: Tensor,
    kept: cache.Kept | None,
    where: cache.Places,
    cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor, cache.Kept]:
    """`layer`, with what is kept of earlier tokens."""
    h = norm.rms_norm(p["attention_norm"], x, cfg.norm_eps)
    out, now = attention.cached(p["attention"], h, cos, sin, where, kept, eps=cfg.norm_eps)
    x = x + out
    h = norm.rms_norm(p["mlp_norm"], x, cfg.norm_eps)
    return x + (feed(cfg, p["moe"], h)[0] if "moe" in p else mlp.swiglu(p["mlp"], h)), now


def extend(
    cfg: MixtralConfig,
    params: dict[str, Any],
    tokens: Tensor,
    positions: Tensor,
    kept: decoder.Cache | None = None,
    length: int = 0,
) -> tuple[Tensor, decoder.Cache]:
    """The logits after further tokens, and the cache with them; see `fx_feather.models.llama.extend`.

    Experts take all tokens that come, since how many that would be is not known before a text ends.
    """
    cos, sin, _ = decoder.turns(params, positions, None, cfg.head_size, cfg.rope_theta, cfg.rope_scaling)
    run = block(ft.partial(extend_layer, dataclasses.replace(cfg, capacity_factor=None)), name="layer")
    return decoder.extended(cfg, params, tokens, positions, kept, length, [run] * cfg.layers, (cos, sin))


def loss(cfg: MixtralConfig) -> Callable[[dict[str, Any], dict[str, Tensor]], tuple[Tensor, Tensor, dict[str, Tensor]]]:
    """The loss function of a model: `loss_fn(params, batch) -> (sum, count, aux)`; see `decoder.penalized`.

    A batch is that of `fx_feather.models.llama.loss`.
    """

    def loss_fn(params: dict[str, Any], batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        tokens, positions, documents, targets = fields(batch)
        h, statistics = hidden(cfg, params, tokens, positions, documents)
        return decoder.penalized(params, h, statistics, targets, cfg.penalties)

    return loss_fn
