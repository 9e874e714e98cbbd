"""Qwen3, dense, against the reference implementation."""

import pytest
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.models.reference import check, packed_equals_alone


@pytest.mark.parametrize("tied", [False, True])
def test_equals_the_reference(tied, tmp_path):
    config = Qwen3Config(
        vocab_size=19,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        intermediate_size=20,
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    )
    model, params = check(Qwen3ForCausalLM, config, tmp_path, 19)
    assert "q_norm" in params["layers"][0]["attention"] and ("head" in params) is not tied
    packed_equals_alone(model, params, 19)
