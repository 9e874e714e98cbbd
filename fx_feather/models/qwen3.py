"""Qwen3's dense decoders: Llama's blocks, with norms of queries and keys and a size of heads that is set apart."""

import dataclasses

from . import llama
from .llama import cache_template as cache_template
from .llama import extend as extend
from .llama import forward as forward
from .llama import loss as loss
from .llama import template as template


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3Config(llama.LlamaConfig):
    """Sizes and constants of a dense Qwen3; the fields are those of `LlamaConfig`, other defaults hold.

    Source: Qwen Team, Qwen3 Technical Report, 2025, section 2.

    >>> cfg = Qwen3Config(vocab=256, layers=2, embed=64, heads=4, kv_heads=2, mlp=128)
    >>> cfg.head_size, cfg.qk_norm
    (128, True)
    """

    head_dim: int | None = 128
    rope_theta: float = 1000000.0
    norm_eps: float = 1e-6
    qk_norm: bool = True
