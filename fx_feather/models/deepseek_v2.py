"""DeepSeek-V2: experts chosen by softmax, within the groups that hold the best ones."""

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor

from fx_feather.nn import router

from . import decoder, deepseek
from .deepseek import cache_template as cache_template


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepSeekV2Config(deepseek.DeepSeekConfig):
    """Sizes and constants of a DeepSeek-V2; the fields are those of `DeepSeekConfig`.

    Source: DeepSeek-V2, 2024, section 2.

    >>> cfg = DeepSeekV2Config(
    ...     vocab=256, layers=2, dense_layers=1, embed=64, heads=4, q_rank=None, kv_rank=16, plain_dim=16, rope_dim=8,
    ...     value_dim=16, mlp=128, expert_mlp=32, experts=8, shared_experts=2, top_k=2)
    >>> sorted(template(cfg)["layers"][1]["moe"])
    ['experts', 'router', 'shared']
    """


def template(cfg: DeepSeekV2Config) -> dict[str, Any]:
    """The parameters of a model, as a pytree of `Param`; see `fx_feather.models.deepseek.template`."""
    return deepseek.template(cfg, bias=False)


def route(cfg: DeepSeekV2Config, params: dict[str, Any], h: Tensor) -> deepseek.Routing:
    """The best experts by softmax, of the groups whose best expert is best (equations 20 and 21)."""
    logits = router.logits(params["weight"], h)
    scores = choice = logits.softmax(-1)
    if cfg.groups > 1:
        choice = router.within_groups(scores, cfg.groups, cfg.top_groups, best=1, fill=0.0)
    weights, index = router.top(scores, cfg.top_k, choice)
    if cfg.normalize:
        weights = router.normalized(weights, 1e-20)
    return weights * cfg.scale, index, logits, scores


def forward(
    cfg: DeepSeekV2Config, params: dict[str, Any], tokens: Tensor, positions: Tensor, documents: Tensor | None = None
) -> Tensor:
    """Logits of the next token at each place of each sequence; see `fx_feather.models.llama.forward`."""
    return decoder.logits(params, deepseek.hidden(cfg, route, params, tokens, positions, documents)[0])


def extend(
    cfg: DeepSeekV2Config,
    params: dict[str, Any],
    tokens: Tensor,
    positions: Tensor,
    kept: decoder.Cache | None = None,
    length: int = 0,
) -> tuple[Tensor, decoder.Cache]:
    """The logits after further tokens, and the cache with them; see `fx_feather.models.llama.extend`."""
    return deepseek.extend(cfg, route, params, tokens, positions, kept, length)


def loss(cfg: DeepSeekV2Config) -> Callable[..., Any]:
    """The loss function of a model: `loss_fn(params, batch) -> (sum, count, aux)`; see `decoder.penalized`."""
    return deepseek.loss(cfg, route)
