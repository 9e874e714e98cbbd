"""Names and settings of GPT-2 in Hugging Face's format: q, k and v side by side, weights with the input first."""

from typing import Any

from ..models.gpt2 import GPT2Config
from .part import Part, whole
from .settings import Json, Settings, dtype_json


def parts(cfg: GPT2Config) -> dict[str, Any]:
    """Where the parameters lie."""
    sizes = {"n": 3, "h": cfg.heads, "d": cfg.embed // cfg.heads, "e": cfg.embed}

    def one(at: str) -> dict[str, Any]:
        def normed(name: str) -> dict[str, Part]:
            return {kind: whole(f"{at}.{name}.{kind}", cfg.embed) for kind in ("weight", "bias")}

        attention: dict[str, Part] = {}
        for i, name in enumerate("qkv"):
            window = {"n": (i, i + 1)}
            attention[name] = Part((f"{at}.attn.c_attn.weight",), "e (n h d) -> e h d", sizes, window)
            attention[f"{name}_bias"] = Part((f"{at}.attn.c_attn.bias",), "(n h d) -> h d", sizes, window)
        attention["o"] = Part((f"{at}.attn.c_proj.weight",), "(h d) e -> h d e", sizes)
        attention["o_bias"] = whole(f"{at}.attn.c_proj.bias", cfg.embed)
        return {
            "attention_norm": normed("ln_1"),
            "attention": attention,
            "mlp_norm": normed("ln_2"),
            "mlp": {
                "up": whole(f"{at}.mlp.c_fc.weight", cfg.embed, cfg.mlp_size),
                "up_bias": whole(f"{at}.mlp.c_fc.bias", cfg.mlp_size),
                "down": whole(f"{at}.mlp.c_proj.weight", cfg.mlp_size, cfg.embed),
                "down_bias": whole(f"{at}.mlp.c_proj.bias", cfg.embed),
            },
        }

    return {
        "embed": whole("transformer.wte.weight", cfg.vocab, cfg.embed),
        "positions": whole("transformer.wpe.weight", cfg.context, cfg.embed),
        "layers": [one(f"transformer.h.{i}") for i in range(cfg.layers)],
        "norm": {kind: whole(f"transformer.ln_f.{kind}", cfg.embed) for kind in ("weight", "bias")},
    }


DEFAULTS: Json = {
    "vocab_size": 50257,
    "n_positions": 1024,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_inner": None,
    "layer_norm_epsilon": 1e-5,
    "initializer_range": 0.02,
}
"""What a missing key means: the defaults of the family's own config class."""


def config(s: Settings) -> GPT2Config:
    """The config of a GPT-2."""
    s.only("activation_function", "gelu_new", "gelu_pytorch_tanh", default="gelu_new")
    s.only("scale_attn_weights", True, default=True)
    s.only("scale_attn_by_inverse_layer_idx", False, default=False)
    s.only("tie_word_embeddings", True, default=True)
    fields = {
        "vocab": s.get("vocab_size"),
        "context": s.get("n_positions", "max_position_embeddings"),
        "layers": s.get("n_layer", "num_hidden_layers"),
        "embed": s.get("n_embd", "hidden_size"),
        "heads": s.get("n_head", "num_attention_heads"),
        "mlp": s.get("n_inner"),
        "norm_eps": s.get("layer_norm_epsilon"),
        "dtype": s.dtype(),
        "init_std": s.get("initializer_range"),
    }
    s.raise_all()
    return GPT2Config(**fields)


def json(cfg: GPT2Config, source: Json) -> Json:
    """The settings of a GPT-2."""
    return {
        "vocab_size": cfg.vocab,
        "n_positions": cfg.context,
        "n_layer": cfg.layers,
        "n_embd": cfg.embed,
        "n_head": cfg.heads,
        "n_inner": cfg.mlp,
        "layer_norm_epsilon": cfg.norm_eps,
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
        "initializer_range": cfg.init_std,
        **dtype_json(cfg.dtype),
    }
