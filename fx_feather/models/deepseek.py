"""What DeepSeek-V2 and V3 share: latent attention, some dense layers, then experts beside those that all tokens use."""

import dataclasses
import functools as ft
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fx_feather.nn import balance, cache, embed, mla, mlp, moe, norm, router
from fx_feather.nn.balance import Penalties, Statistics
from fx_feather.nn.rope_scaling import Scaling, Yarn
from fx_feather.param import Param
from fx_feather.trace import block, constrain

from . import decoder
from .checks import Problems, fields

Routing = tuple[Tensor, Tensor, Tensor, Tensor]
"""Weights and index of the chosen experts, `[batch, seq, k]`; logits and shares of all, `[batch, seq, experts]`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepSeekConfig:
    """Sizes and constants of a DeepSeek decoder; V2 and V3 have configs of their own, with their defaults.

    Args:
        vocab: number of tokens.
        layers: number of blocks.
        dense_layers: how many of them, the first ones, have one feed-forward block in place of experts.
        embed: size of the residual stream.
        heads: number of heads.
        q_rank: size of the latent vector that queries are read off; None to project them directly.
        kv_rank: size of the latent vector that keys and values are read off.
        plain_dim: features of a query or key head without a position.
        rope_dim: features of a query head with one, even.
        value_dim: features of a value head.
        mlp: size of a dense layer's hidden layer.
        expert_mlp: size of an expert's hidden layer.
        experts: number of experts that are routed to.
        shared_experts: number of experts that all tokens use, made as one block.
        top_k: experts a token, of those routed to.
        groups: number of groups of experts, a divisor of `experts`.
        top_groups: how many groups a token's experts come from.
        normalize: the weights of a token's experts sum to 1 before they are scaled.
        scale: multiplies the weights of the experts.
        rope_theta: base of the rotary wavelengths.
        rope_scaling: for texts longer than those of training, from `fx_feather.nn.rope_scaling`.
        norm_eps: added to the mean square in every norm of the stream.
        capacity_factor: how many times its even share of a sequence an expert takes; without it, all that come.
        penalties: what routers add to the loss.
        tied: the head is the embedding's table.
        dtype: dtype of the parameters.
        init_std: standard deviation of the weights at the start.

    Raises:
        ShapeError: sizes that make no model, all of them at once.
    """

    vocab: int
    layers: int
    dense_layers: int
    embed: int
    heads: int
    q_rank: int | None
    kv_rank: int
    plain_dim: int
    rope_dim: int
    value_dim: int
    mlp: int
    expert_mlp: int
    experts: int
    shared_experts: int
    top_k: int
    groups: int = 1
    top_groups: int = 1
    normalize: bool = False
    scale: float = 1.0
    rope_theta: float = 10000.0
    rope_scaling: Scaling | None = None
    norm_eps: float = 1e-6
    capacity_factor: float | None = None
    penalties: Penalties = balance.NONE
    tied: bool = False
    dtype: torch.dtype = torch.float32
    init_std: float = 0.02

    def __post_init__(self) -> None:
        problems = Problems(self)
        problems.sizes("vocab layers embed heads kv_rank plain_dim rope_dim value_dim mlp expert_mlp experts top_k")
        problems.sizes("groups top_groups shared_experts")
        problems.sizes("dense_layers", least=0)
        problems.sizes("q_rank", optional=True)
        problems.constants("scale rope_theta norm_eps init_std")
        problems.constants("capacity_factor", optional=True)
        problems.dtype()
        problems.even("rope_dim")
        problems.divides("experts", "groups", "groups of experts are equally large")
        problems.at_most("top_groups", "groups", "a token's experts come from different groups")
        problems.at_most("dense_layers", "layers", "the dense layers are the first of all")
        if not problems.wrong & {"top_k", "experts", "groups", "top_groups"}:
            room = self.experts // self.groups * self.top_groups
            if self.top_k > room:
                problems.offend(
                    "top_k experts groups top_groups",
                    f"{self.top_k} experts a token, out of {room} in its groups",
                    "a token goes to different experts of its groups",
                    f"top_k={room} at most",
                )
        problems.raise_all()

    @property
    def score_factor(self) -> float:
        """Multiplies the scores of attention."""
        return self.rope_scaling.score_factor if isinstance(self.rope_scaling, Yarn) else 1.0


def template(cfg: DeepSeekConfig, *, bias: bool) -> dict[str, Any]:
    """The parameters of a model, as a pytree of `Param`.

    The projections of a layer that write to the residual stream start smaller by sqrt(2 layers), see
    `fx_feather.models.llama.template`.

    Args:
        cfg: the model's config.
        bias: whether routers have a bias that takes part in the choice.
    """
    std, dtype = cfg.init_std, cfg.dtype
    starts: dict[str, Any] = {"std": std, "out_std": std / math.sqrt(2 * cfg.layers), "dtype": dtype}

    def one_layer(i: int) -> dict[str, Any]:
        params = {
            "attention_norm": norm.rms_template(cfg.embed, dtype=dtype),
            "attention": mla.template(
                cfg.embed,
                cfg.heads,
                q_rank=cfg.q_rank,
                kv_rank=cfg.kv_rank,
                plain_dim=cfg.plain_dim,
                rope_dim=cfg.rope_dim,
                value_dim=cfg.value_dim,
                **starts,
            ),
            "mlp_norm": norm.rms_template(cfg.embed, dtype=dtype),
        }
        if i < cfg.dense_layers:
            return params | {"mlp": mlp.template(cfg.embed, cfg.mlp, **starts)}
        return params | {
            "moe": {
                "router": router.template(cfg.embed, cfg.experts, bias=bias, std=std, dtype=dtype),
                "experts": moe.template(cfg.embed, cfg.expert_mlp, cfg.experts, **starts),
                "shared": mlp.template(cfg.embed, cfg.expert_mlp * cfg.shared_experts, **starts),
            }
        }

    params: dict[str, Any] = {
        "embed": embed.template(cfg.vocab, cfg.embed, std=std, dtype=dtype),
        "layers": [one_layer(i) for i in range(cfg.layers)],
        "norm": norm.rms_template(cfg.embed, dtype=dtype),
    }
    if not cfg.tied:
        params["head"] = embed.template(cfg.vocab, cfg.embed, std=std, dtype=dtype)
    return params


def attended(cfg: DeepSeekConfig, p: dict[str, Any], x: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    """The stream after attention, and its normed copy for the second half of a block."""
    h = norm.rms_norm(p["attention_norm"], x, cfg.norm_eps)
    x = x + mla.mla(p["attention"], h, *args, score_factor=cfg.score_factor)
    return x, norm.rms_norm(p["mlp_norm"], x, cfg.norm_eps)


def dense_layer(cfg: DeepSeekConfig, p: dict[str, Any], x: Tensor, *args: Any) -> Tensor:
    """One block with one feed-forward block; arguments as for `fx_feather.models.llama.layer`."""
    x, h = attended(cfg, p, x, *args)
    return x + mlp.swiglu(p["mlp"], h)


def moe_layer(
    cfg: DeepSeekConfig, route: Callable[..., Routing], p: dict[str, Any], x: Tensor, *args: Any
) -> tuple[Tensor, Statistics]:
    """One block with experts; `route(cfg, params, h)` chooses them."""
    x, h = attended(cfg, p, x, *args)
    out, statistics = fed(cfg, route, p["moe"], h)
    return x + out, statistics


def fed(cfg: DeepSeekConfig, route: Callable[..., Routing], p: dict[str, Any], h: Tensor) -> tuple[Tensor, Statistics]:
    """What the experts of a layer, the chosen and the shared ones, make of each token."""
    h = constrain(h, "batch seq embed")
    weights, index, logits, shares = route(cfg, p["router"], h)
    routed = moe.mixture(p["experts"], h, weights, index, cfg.capacity_factor)
    return routed + mlp.swiglu(p["shared"], h), balance.statistics(cfg.penalties, logits, shares, index)


def turns(
    cfg: DeepSeekConfig, params: dict[str, Any], positions: Tensor, documents: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cosines, sines and the mask of documents; see `decoder.turns`."""
    sizes = (cfg.rope_dim, cfg.rope_theta, cfg.rope_scaling)
    return decoder.turns(params, positions, documents, *sizes, "neighbours")


def hidden(
    cfg: DeepSeekConfig,
    route: Callable[..., Routing],
    params: dict[str, Any],
    tokens: Tensor,
    positions: Tensor,
    documents: Tensor | None = None,
) -> tuple[Tensor, list[Statistics]]:
    """The normed stream after the last block, and what each router did."""
    args = turns(cfg, params, positions, documents)
    dense = block(ft.partial(dense_layer, cfg), name="dense_layer")
    experts = block(ft.partial(moe_layer, cfg, route), name="moe_layer")
    layers = [dense] * cfg.dense_layers + [experts] * (cfg.layers - cfg.dense_layers)
    return decoder.hidden(params, tokens, layers, args, cfg.norm_eps)


def cache_template(
    cfg: DeepSeekConfig, batch: int, length: int, dtype: torch.dtype | None = None
) -> list[dict[str, Param]]:
    """A cache of latents, as a pytree of `Param`; arguments as for `fx_feather.models.llama.cache_template`."""
    return [cache.latent_template(batch, length, cfg.kv_rank, cfg.rope_dim, dtype=dtype or cfg.dtype)] * cfg.layers


def extend_layer(
    cfg: DeepSeekConfig,
    route: Callable[..., Routing],
    p: dict[str, Any],
    x: Tensor,
    kept: cache.Kept | None,
    *args: Any,
) -> tuple[Tensor, cache.Kept]:
    """A block of either kind, with what is kept of earlier tokens."""
    where, cos, sin = args
    h = norm.rms_norm(p["attention_norm"], x, cfg.norm_eps)
    out, now = mla.cached(p["attention"], h, cos, sin, where, kept, score_factor=cfg.score_factor)
    x = x + out
    h = norm.rms_norm(p["mlp_norm"], x, cfg.norm_eps)
    return x + (fed(cfg, route, p["moe"], h)[0] if "moe" in p else mlp.swiglu(p["mlp"], h)), now


def extend(
    cfg: DeepSeekConfig,
    route: Callable[..., Routing],
    params: dict[str, Any],
    tokens: Tensor,
    positions: Tensor,
    kept: decoder.Cache | None = None,
    length: int = 0,
) -> tuple[Tensor, decoder.Cache]:
    """The logits after further tokens, and the cache with them; see `fx_feather.models.llama.extend`.

    Experts take all tokens that come, as in `fx_feather.models.mixtral.extend`.
    """
    cos, sin, _ = turns(cfg, params, positions)
    run = block(ft.partial(extend_layer, dataclasses.replace(cfg, capacity_factor=None), route), name="layer")
    return decoder.extended(cfg, params, tokens, positions, kept, length, [run] * cfg.layers, (cos, sin))


def loss(
    cfg: DeepSeekConfig, route: Callable[..., Routing]
) -> Callable[[dict[str, Any], dict[str, Tensor]], tuple[Tensor, Tensor, dict[str, Tensor]]]:
    """The loss function of a model: `loss_fn(params, batch) -> (sum, count, aux)`; see `decoder.penalized`."""

    def loss_fn(params: dict[str, Any], batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        tokens, positions, documents, targets = fields(batch)
        h, statistics = hidden(cfg, route, params, tokens, positions, documents)
        return decoder.penalized(params, h, statistics, targets, cfg.penalties)

    return loss_fn
