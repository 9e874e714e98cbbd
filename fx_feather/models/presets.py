"""Configs of public models, by the names that they are published under."""

from typing import Any

import torch

from fx_feather.nn.rope_scaling import Llama3, Yarn

from .deepseek_v2 import DeepSeekV2Config
from .deepseek_v3 import DeepSeekV3Config
from .llama import LlamaConfig
from .mixtral import MixtralConfig
from .qwen3_moe import Qwen3MoEConfig

_LLAMA3: dict[str, Any] = {"vocab": 128256, "kv_heads": 8, "rope_theta": 500000.0, "dtype": torch.bfloat16}
_DEEPSEEK: dict[str, Any] = {
    "kv_rank": 512,
    "plain_dim": 128,
    "rope_dim": 64,
    "value_dim": 128,
    "dtype": torch.bfloat16,
}
_V2_LONG = Yarn(factor=40.0, trained=4096, mscale=0.707, mscale_all_dim=0.707)

PRESETS: dict[str, Any] = {
    "Llama-2-7B": LlamaConfig(
        vocab=32000, layers=32, embed=4096, heads=32, kv_heads=32, mlp=11008, dtype=torch.bfloat16
    ),
    "Llama-3-8B": LlamaConfig(**_LLAMA3, layers=32, embed=4096, heads=32, mlp=14336),
    "Llama-3-70B": LlamaConfig(**_LLAMA3, layers=80, embed=8192, heads=64, mlp=28672),
    "Llama-3.1-405B": LlamaConfig(
        **_LLAMA3, layers=126, embed=16384, heads=128, mlp=53248, rope_scaling=Llama3(factor=8.0, trained=8192)
    ),
    "Mixtral-8x7B": MixtralConfig(
        vocab=32000, layers=32, embed=4096, heads=32, kv_heads=8, expert_mlp=14336, experts=8, dtype=torch.bfloat16
    ),
    "Qwen3-30B-A3B": Qwen3MoEConfig(
        vocab=151936, layers=48, embed=2048, heads=32, kv_heads=4, expert_mlp=768, experts=128, dtype=torch.bfloat16
    ),
    "DeepSeek-V2-Lite": DeepSeekV2Config(
        **_DEEPSEEK, vocab=102400, layers=27, dense_layers=1, embed=2048, heads=16, q_rank=None, mlp=10944,
        expert_mlp=1408, experts=64, shared_experts=2, top_k=6, rope_scaling=_V2_LONG,
    ),
    "DeepSeek-V2": DeepSeekV2Config(
        **_DEEPSEEK, vocab=102400, layers=60, dense_layers=1, embed=5120, heads=128, q_rank=1536, mlp=12288,
        expert_mlp=1536, experts=160, shared_experts=2, top_k=6, groups=8, top_groups=3, scale=16.0,
        rope_scaling=_V2_LONG,
    ),
    "DeepSeek-V3": DeepSeekV3Config(
        **_DEEPSEEK, vocab=129280, layers=61, dense_layers=3, embed=7168, heads=128, q_rank=1536, mlp=18432,
        expert_mlp=2048, experts=256, shared_experts=1, top_k=8, groups=8, top_groups=4,
        rope_scaling=Yarn(factor=40.0, trained=4096, mscale=1.0, mscale_all_dim=1.0),
    ),
}  # fmt: skip
"""Name -> config. DeepSeek-V3 is without the layers that predict further tokens, as its published size is."""
