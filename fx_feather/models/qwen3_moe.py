"""Qwen3's decoders with experts: Mixtral's blocks, with many small experts and norms of queries and keys."""

import dataclasses

from . import mixtral
from .mixtral import cache_template as cache_template
from .mixtral import extend as extend
from .mixtral import forward as forward
from .mixtral import loss as loss
from .mixtral import template as template


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3MoEConfig(mixtral.MixtralConfig):
    """Sizes and constants of a Qwen3 with experts; the fields are those of `MixtralConfig`, other defaults hold.

    Source: Qwen Team, Qwen3 Technical Report, 2025, section 2.

    >>> Qwen3MoEConfig(vocab=256, layers=2, embed=64, heads=4, kv_heads=2, expert_mlp=32, experts=16).top_k
    8
    """

    top_k: int = 8
    head_dim: int | None = 128
    rope_theta: float = 1000000.0
    norm_eps: float = 1e-6
    qk_norm: bool = True
