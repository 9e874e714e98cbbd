"""Names and settings of DeepSeek-V2 and V3 in Hugging Face's format."""

from typing import Any

from ..models.deepseek import DeepSeekConfig
from ..models.deepseek_v2 import DeepSeekV2Config
from ..models.deepseek_v3 import DeepSeekV3Config
from .decoders import QWEN_NAMES, around, experts, norms, swiglu
from .part import Part, turned, whole
from .settings import Json, Settings, dtype_json, rope_json


def _attention(cfg: DeepSeekConfig, at: str) -> dict[str, Part]:
    heads = {"h": cfg.heads, "d": cfg.plain_dim + cfg.rope_dim}
    down = {"r": cfg.kv_rank + cfg.rope_dim, "e": cfg.embed}
    up = {"h": cfg.heads, "d": cfg.plain_dim + cfg.value_dim, "r": cfg.kv_rank}
    latent, keys = f"{at}.kv_a_proj_with_mqa.weight", f"{at}.kv_b_proj.weight"
    if cfg.q_rank is None:
        q = {"q": Part((f"{at}.q_proj.weight",), "(h d) e -> e h d", heads | {"e": cfg.embed})}
    else:
        q = {
            "q_down": turned(f"{at}.q_a_proj.weight", cfg.q_rank, cfg.embed),
            "q_norm": whole(f"{at}.q_a_layernorm.weight", cfg.q_rank),
            "q_up": Part((f"{at}.q_b_proj.weight",), "(h d) r -> r h d", heads | {"r": cfg.q_rank}),
        }
    return q | {
        "kv_down": Part((latent,), "r e -> e r", down, {"r": (0, cfg.kv_rank)}),
        "kv_norm": whole(f"{at}.kv_a_layernorm.weight", cfg.kv_rank),
        "k_rope": Part((latent,), "r e -> e r", down, {"r": (cfg.kv_rank, cfg.kv_rank + cfg.rope_dim)}),
        "k_up": Part((keys,), "(h d) r -> r h d", up, {"d": (0, cfg.plain_dim)}),
        "v_up": Part((keys,), "(h d) r -> r h d", up, {"d": (cfg.plain_dim, cfg.plain_dim + cfg.value_dim)}),
        "o": Part(
            (f"{at}.o_proj.weight",), "e (h d) -> h d e", {"h": cfg.heads, "d": cfg.value_dim, "e": cfg.embed}
        ),
    }  # fmt: skip


def parts(cfg: DeepSeekConfig) -> dict[str, Any]:
    """Where the parameters lie."""
    bias = isinstance(cfg, DeepSeekV3Config)

    def one(i: int) -> dict[str, Any]:
        layer = f"model.layers.{i}"
        own = norms(layer, cfg.embed) | {"attention": _attention(cfg, f"{layer}.self_attn")}
        if i < cfg.dense_layers:
            return own | {"mlp": swiglu(f"{layer}.mlp", cfg.embed, cfg.mlp)}
        router = {"weight": turned(f"{layer}.mlp.gate.weight", cfg.experts, cfg.embed)}
        if bias:
            router["bias"] = whole(f"{layer}.mlp.gate.e_score_correction_bias", cfg.experts)
        routed = experts(f"{layer}.mlp.experts", cfg.experts, cfg.embed, cfg.expert_mlp, QWEN_NAMES[1])
        shared = swiglu(f"{layer}.mlp.shared_experts", cfg.embed, cfg.expert_mlp * cfg.shared_experts)
        return own | {"moe": {"router": router, "experts": routed, "shared": shared}}

    return around(cfg, [one(i) for i in range(cfg.layers)])


V2: Json = {
    "vocab_size": 102400,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "first_k_dense_replace": 0,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "routed_scaling_factor": 1.0,
    "v_head_dim": 128,
    "moe_intermediate_size": 1407,
}
V3: Json = {
    **V2,
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}
"""What a missing key means: the defaults of a family's own config class."""


def _fields(s: Settings) -> dict[str, Any]:
    s.only("hidden_act", "silu", "swish", default="silu")
    s.only("attention_bias", False, default=False)
    s.only("mlp_bias", False, default=False)
    s.only("moe_layer_freq", 1, default=1)
    theta, scaling = s.rope(10000.0)
    return {
        "vocab": s.get("vocab_size"),
        "layers": s.get("num_hidden_layers"),
        "dense_layers": s.get("first_k_dense_replace"),
        "embed": s.get("hidden_size"),
        "heads": s.get("num_attention_heads"),
        "q_rank": None if s.json.get("q_lora_rank", ...) is None else s.get("q_lora_rank"),
        "kv_rank": s.get("kv_lora_rank"),
        "plain_dim": s.get("qk_nope_head_dim"),
        "rope_dim": s.get("qk_rope_head_dim"),
        "value_dim": s.get("v_head_dim"),
        "mlp": s.get("intermediate_size"),
        "expert_mlp": s.get("moe_intermediate_size"),
        "experts": s.get("n_routed_experts", "num_experts", "num_local_experts"),
        "shared_experts": s.get("n_shared_experts"),
        "top_k": s.get("num_experts_per_tok"),
        "scale": s.get("routed_scaling_factor"),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "norm_eps": s.get("rms_norm_eps"),
        "tied": s.flag("tie_word_embeddings"),
        "dtype": s.dtype(),
        "init_std": s.get("initializer_range"),
    }


def _json(cfg: DeepSeekConfig, source: Json) -> Json:
    return {
        "vocab_size": cfg.vocab,
        "num_hidden_layers": cfg.layers,
        "first_k_dense_replace": cfg.dense_layers,
        "hidden_size": cfg.embed,
        "num_attention_heads": cfg.heads,
        "num_key_value_heads": cfg.heads,
        "q_lora_rank": cfg.q_rank,
        "kv_lora_rank": cfg.kv_rank,
        "qk_nope_head_dim": cfg.plain_dim,
        "qk_rope_head_dim": cfg.rope_dim,
        "v_head_dim": cfg.value_dim,
        "intermediate_size": cfg.mlp,
        "moe_intermediate_size": cfg.expert_mlp,
        "n_routed_experts": cfg.experts,
        "n_shared_experts": cfg.shared_experts,
        "num_experts_per_tok": cfg.top_k,
        "n_group": cfg.groups,
        "topk_group": cfg.top_groups,
        "norm_topk_prob": cfg.normalize,
        "routed_scaling_factor": cfg.scale,
        "moe_layer_freq": 1,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": cfg.norm_eps,
        "tie_word_embeddings": cfg.tied,
        "initializer_range": cfg.init_std,
        **rope_json(cfg.rope_theta, cfg.rope_scaling, source),
        **dtype_json(cfg.dtype),
    }


def v2_config(s: Settings) -> DeepSeekV2Config:
    """The config of a DeepSeek-V2; groups count only where experts are chosen by them."""
    s.only("scoring_func", "softmax", default="softmax")
    s.only("topk_method", "greedy", "group_limited_greedy", default="greedy")
    # The released code and the reference implementation differ in what they make of it.
    s.only("norm_topk_prob", False, default=False)
    limited = s.json.get("topk_method") == "group_limited_greedy"
    groups = {"groups": s.get("n_group"), "top_groups": s.get("topk_group")} if limited else {}
    fields = _fields(s)
    s.raise_all()
    return DeepSeekV2Config(**fields, **groups)


def v2_json(cfg: DeepSeekV2Config, source: Json) -> Json:
    """The settings of a DeepSeek-V2."""
    method = "greedy" if cfg.groups == 1 else "group_limited_greedy"
    return _json(cfg, source) | {"topk_method": method, "scoring_func": "softmax"}


def v3_config(s: Settings) -> DeepSeekV3Config:
    """The config of a DeepSeek-V3, without its layers that predict further tokens."""
    s.only("scoring_func", "sigmoid", default="sigmoid")
    s.only("topk_method", "noaux_tc", default="noaux_tc")
    s.only("rope_interleave", True, default=True)
    fields = _fields(s) | {
        "groups": s.get("n_group"),
        "top_groups": s.get("topk_group"),
        "normalize": s.flag("norm_topk_prob"),
    }
    s.raise_all()
    return DeepSeekV3Config(**fields)


def v3_json(cfg: DeepSeekV3Config, source: Json) -> Json:
    """The settings of a DeepSeek-V3."""
    return _json(cfg, source) | {
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "rope_interleave": True,
        "num_nextn_predict_layers": 0,
    }
