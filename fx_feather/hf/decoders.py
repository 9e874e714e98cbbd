"""Names and settings of rotary decoders in Hugging Face's format: Llama, Qwen3, Mixtral, Qwen3 with experts."""

from typing import Any

from ..models import llama, mixtral, qwen3, qwen3_moe
from ..nn.balance import NONE, Penalties
from .part import Part, turned, whole
from .settings import Json, Settings, dtype_json, rope_json


def attention(layer: str, embed: int, heads: int, kv_heads: int, head_dim: int, qk_norm: bool) -> dict[str, Part]:
    """The projections of grouped-query attention."""
    at, into = f"{layer}.self_attn", "(h d) e -> e h d"
    q = {"h": heads, "d": head_dim, "e": embed}
    kv = {"h": kv_heads, "d": head_dim, "e": embed}
    parts = {
        "q": Part((f"{at}.q_proj.weight",), into, q),
        "k": Part((f"{at}.k_proj.weight",), into, kv),
        "v": Part((f"{at}.v_proj.weight",), into, kv),
        "o": Part((f"{at}.o_proj.weight",), "e (h d) -> h d e", q),
    }
    if qk_norm:
        parts |= {name: whole(f"{at}.{name}.weight", head_dim) for name in ("q_norm", "k_norm")}
    return parts


def swiglu(at: str, embed: int, mlp: int) -> dict[str, Part]:
    """The projections of one feed-forward block."""
    return {
        "gate": turned(f"{at}.gate_proj.weight", mlp, embed),
        "up": turned(f"{at}.up_proj.weight", mlp, embed),
        "down": turned(f"{at}.down_proj.weight", embed, mlp),
    }


def experts(at: str, count: int, embed: int, mlp: int, names: dict[str, str]) -> dict[str, Part]:
    """The projections of all experts, each in tensors of its own."""
    sizes = {"gate": (mlp, embed), "up": (mlp, embed), "down": (embed, mlp)}
    return {
        ours: Part(tuple(f"{at}.{e}.{names[ours]}.weight" for e in range(count)), "o i -> i o", {"o": out, "i": inputs})
        for ours, (out, inputs) in sizes.items()
    }


def around(cfg: Any, layers: list[Any]) -> dict[str, Any]:
    """Embedding, last norm and head around the layers."""
    parts: dict[str, Any] = {
        "embed": whole("model.embed_tokens.weight", cfg.vocab, cfg.embed),
        "layers": layers,
        "norm": whole("model.norm.weight", cfg.embed),
    }
    if not cfg.tied:
        parts["head"] = whole("lm_head.weight", cfg.vocab, cfg.embed)
    return parts


def norms(layer: str, embed: int) -> dict[str, Part]:
    """The two norms of a layer."""
    return {
        "attention_norm": whole(f"{layer}.input_layernorm.weight", embed),
        "mlp_norm": whole(f"{layer}.post_attention_layernorm.weight", embed),
    }


def dense_parts(cfg: llama.LlamaConfig) -> dict[str, Any]:
    """Where the parameters of a Llama or a dense Qwen3 lie."""

    def one(layer: str) -> dict[str, Any]:
        own = attention(layer, cfg.embed, cfg.heads, cfg.kv_heads, cfg.head_size, cfg.qk_norm)
        return norms(layer, cfg.embed) | {"attention": own, "mlp": swiglu(f"{layer}.mlp", cfg.embed, cfg.mlp)}

    return around(cfg, [one(f"model.layers.{i}") for i in range(cfg.layers)])


MIXTRAL_NAMES = ("block_sparse_moe", {"gate": "w1", "up": "w3", "down": "w2"})
QWEN_NAMES = ("mlp", {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"})


def moe_parts(cfg: mixtral.MixtralConfig, words: tuple[str, dict[str, str]]) -> dict[str, Any]:
    """Where the parameters of a Mixtral or a Qwen3 with experts lie."""
    block, names = words

    def one(i: int) -> dict[str, Any]:
        layer = f"model.layers.{i}"
        own = attention(layer, cfg.embed, cfg.heads, cfg.kv_heads, cfg.head_size, cfg.qk_norm)
        if i in cfg.dense:
            dense = swiglu(f"{layer}.mlp", cfg.embed, cfg.mlp or 0)
            return norms(layer, cfg.embed) | {"attention": own, "mlp": dense}
        moe = {
            "router": {"weight": turned(f"{layer}.{block}.gate.weight", cfg.experts, cfg.embed)},
            "experts": experts(f"{layer}.{block}.experts", cfg.experts, cfg.embed, cfg.expert_mlp, names),
        }
        return norms(layer, cfg.embed) | {"attention": own, "moe": moe}

    return around(cfg, [one(i) for i in range(cfg.layers)])


_PLAIN: Json = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_size": 4096,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "head_dim": None,
}
_ROUTED: Json = {"output_router_logits": False, "router_aux_loss_coef": 0.001}

LLAMA: Json = {**_PLAIN, "vocab_size": 32000, "intermediate_size": 11008}
QWEN3: Json = {
    **_PLAIN,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "head_dim": 128,
}
MIXTRAL: Json = {
    **_PLAIN,
    **_ROUTED,
    "vocab_size": 32000,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
QWEN3_MOE: Json = {
    **_PLAIN,
    **_ROUTED,
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "intermediate_size": 6144,
    "norm_topk_prob": False,
}
"""What a missing key means, family by family: the defaults of its own config class."""


def kv_heads(s: Settings) -> Any:
    """As many as there are query heads where the key is null, or missing in a family without a default."""
    key = "num_key_value_heads"
    null = key in s.json or key not in s.defaults
    return s.get("num_attention_heads") if null and s.json.get(key) is None else s.get(key)


def _shared(s: Settings, theta: float) -> dict[str, Any]:
    """The fields that all configs of this file have."""
    s.only("hidden_act", "silu", "swish", default="silu")
    s.only("attention_bias", False, default=False)
    layer_types = s.json.get("layer_types") or []
    if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
        s.offend("layer_types", "not all are 'full_attention'", "all layers here see all earlier tokens")
    base, scaling = s.rope(theta)
    return {
        "vocab": s.get("vocab_size"),
        "layers": s.get("num_hidden_layers"),
        "embed": s.get("hidden_size"),
        "heads": s.get("num_attention_heads"),
        "kv_heads": kv_heads(s),
        "rope_theta": base,
        "rope_scaling": scaling,
        "norm_eps": s.get("rms_norm_eps"),
        "tied": s.flag("tie_word_embeddings"),
        "dtype": s.dtype(),
        "init_std": s.get("initializer_range"),
    }


def _shared_json(cfg: Any, source: Json) -> Json:
    size = {} if cfg.head_dim is None else {"head_dim": cfg.head_dim}
    return {
        **size,
        "vocab_size": cfg.vocab,
        "num_hidden_layers": cfg.layers,
        "hidden_size": cfg.embed,
        "num_attention_heads": cfg.heads,
        "num_key_value_heads": cfg.kv_heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": cfg.norm_eps,
        "tie_word_embeddings": cfg.tied,
        "initializer_range": cfg.init_std,
        **rope_json(cfg.rope_theta, cfg.rope_scaling, source),
        **dtype_json(cfg.dtype),
    }


def llama_config(s: Settings) -> llama.LlamaConfig:
    """The config of a Llama."""
    s.only("mlp_bias", False, default=False)
    fields = _shared(s, 10000.0) | {
        "mlp": s.get("intermediate_size"),
        "head_dim": s.get("head_dim"),
    }
    s.raise_all()
    return llama.LlamaConfig(**fields)


def llama_json(cfg: llama.LlamaConfig, source: Json) -> Json:
    """The settings of a Llama."""
    return _shared_json(cfg, source) | {"intermediate_size": cfg.mlp, "mlp_bias": False}


def qwen3_config(s: Settings) -> qwen3.Qwen3Config:
    """The config of a dense Qwen3."""
    s.only("use_sliding_window", False, default=False)
    fields = _shared(s, 10000.0) | {"mlp": s.get("intermediate_size"), "head_dim": s.get("head_dim")}
    s.raise_all()
    return qwen3.Qwen3Config(**fields)


def qwen3_json(cfg: qwen3.Qwen3Config, source: Json) -> Json:
    """The settings of a dense Qwen3."""
    own = {"intermediate_size": cfg.mlp, "head_dim": cfg.head_size, "use_sliding_window": False}
    return _shared_json(cfg, source) | own


def mixtral_config(s: Settings) -> mixtral.MixtralConfig:
    """The config of a Mixtral."""
    s.only("sliding_window", None, default=None)
    fields = _shared(s, 1000000.0) | {
        "expert_mlp": s.get("intermediate_size"),
        "experts": s.get("num_local_experts", "num_experts"),
        "top_k": s.get("num_experts_per_tok"),
        "head_dim": s.get("head_dim"),
        "penalties": _penalties(s),
    }
    s.raise_all()
    return mixtral.MixtralConfig(**fields)


def _penalties(s: Settings) -> Penalties:
    """The load-balancing loss, of all layers' tokens together, where the routers' logits are put out."""
    wanted = s.flag("output_router_logits")
    return Penalties(pooled=s.number("router_aux_loss_coef")) if wanted else NONE


def _penalties_json(cfg: mixtral.MixtralConfig) -> Json:
    pooled = cfg.penalties.pooled
    return {"output_router_logits": pooled > 0} | ({"router_aux_loss_coef": pooled} if pooled else {})


def mixtral_json(cfg: mixtral.MixtralConfig, source: Json) -> Json:
    """The settings of a Mixtral."""
    return _shared_json(cfg, source) | {
        "intermediate_size": cfg.expert_mlp,
        "num_local_experts": cfg.experts,
        "num_experts_per_tok": cfg.top_k,
        **_penalties_json(cfg),
    }


def qwen3_moe_config(s: Settings) -> qwen3_moe.Qwen3MoEConfig:
    """The config of a Qwen3 with experts."""
    s.only("use_sliding_window", False, default=False)
    fields = _shared(s, 10000.0) | {
        "expert_mlp": s.get("moe_intermediate_size"),
        "experts": s.get("num_experts", "num_local_experts"),
        "top_k": s.get("num_experts_per_tok"),
        "head_dim": s.get("head_dim"),
        "normalize": s.flag("norm_topk_prob"),
        "penalties": _penalties(s),
    }
    fields["dense"] = _dense_layers(s, fields["layers"])
    if fields["dense"]:
        fields["mlp"] = s.get("intermediate_size")
    s.raise_all()
    return qwen3_moe.Qwen3MoEConfig(**fields)


def _dense_layers(s: Settings, layers: Any) -> tuple[int, ...]:
    """The layers without experts: those of `mlp_only_layers`, and all but every `decoder_sparse_step`-th."""
    listed, step = s.json.get("mlp_only_layers") or [], s.json.get("decoder_sparse_step", 1)
    if not isinstance(listed, list) or any(type(i) is not int for i in listed):
        s.offend("mlp_only_layers", "it is no list of whole numbers", "it numbers the layers without experts, from 0")
        return ()
    if type(step) is not int or step < 1:
        s.offend("decoder_sparse_step", f"{step!r} is no whole number above 0", "every so many layers one has experts")
        return ()
    if type(layers) is not int:
        return ()
    return tuple(i for i in range(min(layers, 1 << 16)) if i in listed or (i + 1) % step)


def qwen3_moe_json(cfg: qwen3_moe.Qwen3MoEConfig, source: Json) -> Json:
    """The settings of a Qwen3 with experts."""
    return _shared_json(cfg, source) | {
        **({} if cfg.mlp is None else {"intermediate_size": cfg.mlp}),
        "moe_intermediate_size": cfg.expert_mlp,
        "num_experts": cfg.experts,
        "num_local_experts": cfg.experts,
        "num_experts_per_tok": cfg.top_k,
        "norm_topk_prob": cfg.normalize,
        **_penalties_json(cfg),
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(cfg.dense),
        "use_sliding_window": False,
    }
