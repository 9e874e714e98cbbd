"""DeepSeek-V3: experts weighed by a sigmoid each, and chosen with a bias that balances them without a loss."""

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor

from fx_feather.nn import router
from fx_feather.nn.balance import nudged

from . import decoder, deepseek
from .deepseek import cache_template as cache_template


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepSeekV3Config(deepseek.DeepSeekConfig):
    """Sizes and constants of a DeepSeek-V3; the fields are those of `DeepSeekConfig`, other defaults hold.

    Source: DeepSeek-V3, 2024, section 2.1.

    >>> cfg = DeepSeekV3Config(
    ...     vocab=256, layers=2, dense_layers=1, embed=64, heads=4, q_rank=24, kv_rank=16, plain_dim=16, rope_dim=8,
    ...     value_dim=16, mlp=128, expert_mlp=32, experts=8, shared_experts=1, top_k=2)
    >>> template(cfg)["layers"][1]["moe"]["router"]["bias"].shape
    (8,)
    """

    normalize: bool = True
    scale: float = 2.5


def template(cfg: DeepSeekV3Config) -> dict[str, Any]:
    """The parameters of a model, as a pytree of `Param`; see `fx_feather.models.deepseek.template`.

    The bias of a router has no gradient. `nudge` moves it as part of a step, and an optimizer that
    decays weights should leave it out.
    """
    return deepseek.template(cfg, bias=True)


def route(cfg: DeepSeekV3Config, params: dict[str, Any], h: Tensor) -> deepseek.Routing:
    """The best experts by sigmoid and bias, of the groups whose two best are best (equations 12 to 16)."""
    logits = router.logits(params["weight"], h)
    scores = logits.sigmoid()
    choice = scores.detach() + params["bias"].detach()
    if cfg.groups > 1:
        best = min(2, cfg.experts // cfg.groups)
        choice = router.within_groups(choice, cfg.groups, cfg.top_groups, best, float("-inf"))
    weights, index = router.top(scores, cfg.top_k, choice)
    if cfg.normalize:
        weights = router.normalized(weights, 1e-20)
    shares = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    return weights * cfg.scale, index, logits, shares


def nudge(params: dict[str, Any], load: Tensor, rate: float = 0.001) -> dict[str, Any]:
    """The parameters after their routers' biases were moved against the load of a step.

    As part of the step: `compile_step(..., adjust=lambda params, aux: nudge(params, aux["load"]))`.

    Args:
        params: like `template(cfg)`, as tensors.
        load: `[layers with experts, experts]`, from the loss function's statistics, summed over the step.
        rate: size of the change.

    Source: DeepSeek-V3, 2024, section 2.1.2.
    """

    rows = iter(load)
    layers = []
    for p in params["layers"]:
        if "moe" in p:
            bias = nudged(p["moe"]["router"]["bias"], next(rows), rate)
            p = p | {"moe": p["moe"] | {"router": p["moe"]["router"] | {"bias": bias}}}
        layers.append(p)
    return params | {"layers": layers}


def forward(
    cfg: DeepSeekV3Config, params: dict[str, Any], tokens: Tensor, positions: Tensor, documents: Tensor | None = None
) -> Tensor:
    """Logits of the next token at each place of each sequence; see `fx_feather.models.llama.forward`."""
    return decoder.logits(params, deepseek.hidden(cfg, route, params, tokens, positions, documents)[0])


def extend(
    cfg: DeepSeekV3Config,
    params: dict[str, Any],
    tokens: Tensor,
    positions: Tensor,
    kept: decoder.Cache | None = None,
    length: int = 0,
) -> tuple[Tensor, decoder.Cache]:
    """The logits after further tokens, and the cache with them; see `fx_feather.models.llama.extend`."""
    return deepseek.extend(cfg, route, params, tokens, positions, kept, length)


def loss(cfg: DeepSeekV3Config) -> Callable[..., Any]:
    """The loss function of a model: `loss_fn(params, batch) -> (sum, count, aux)`; see `decoder.penalized`."""
    return deepseek.loss(cfg, route)
