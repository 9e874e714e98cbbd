"""Llama 2 and 3 against the reference implementation: MHA, GQA and MQA, every kind of rotary positions."""

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from tests.models.reference import check, packed_equals_alone

SIZES = {
    "vocab_size": 19,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 20,
    "max_position_embeddings": 64,
}
ROPE = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_heads(kv_heads, tmp_path):
    config = LlamaConfig(**SIZES, num_key_value_heads=kv_heads, rope_parameters=dict(ROPE["default"]))
    model, params = check(LlamaForCausalLM, config, tmp_path, 19)
    assert model.config.kv_heads == kv_heads
    packed_equals_alone(model, params, 19)


@pytest.mark.parametrize("kind", [k for k in ROPE if k != "default"])
def test_rope(kind, tmp_path):
    # Texts of 12 tokens are longer than 8, so that a dynamic table differs.
    longest = {"max_position_embeddings": 8} if kind == "dynamic" else {}
    config = LlamaConfig(**{**SIZES, **longest}, num_key_value_heads=2, rope_parameters=dict(ROPE[kind]))
    check(LlamaForCausalLM, config, tmp_path, 19)


def test_tied_with_a_head_size_of_its_own(tmp_path):
    config = LlamaConfig(**SIZES, num_key_value_heads=2, head_dim=6, tie_word_embeddings=True, rms_norm_eps=1e-3)
    model, _ = check(LlamaForCausalLM, config, tmp_path, 19)
    assert model.config.tied and model.config.head_size == 6 and model.config.norm_eps == 1e-3
