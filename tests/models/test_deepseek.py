"""DeepSeek-V2 and V3 against the reference implementations, and the bias that balances without a loss."""

import dataclasses

import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

import fx_feather as ff
from fx_feather import tree
from fx_feather.errors import ShapeError
from fx_feather.models import deepseek_v3
from tests.models.reference import batch_of, check, packed_equals_alone

SIZES = {
    "vocab_size": 19,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 20,
    "moe_intermediate_size": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8,
    "mscale": 0.707,
    "mscale_all_dim": 0.9,
    "beta_fast": 4,
    "beta_slow": 1,
}
V2 = {
    "lite": {"q_lora_rank": None, "n_shared_experts": 2, "topk_method": "greedy"},
    "groups": {
        "q_lora_rank": 7,
        "n_shared_experts": 1,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 3.0,
        "rope_parameters": YARN,
    },
}
V3 = {
    "groups": {"q_lora_rank": 7, "n_group": 2, "topk_group": 1, "rope_parameters": YARN},
    "no q rank": {"q_lora_rank": None, "n_group": 4, "topk_group": 3, "norm_topk_prob": False},
}


@pytest.mark.parametrize("case", V2)
def test_v2(case, tmp_path):
    config = DeepseekV2Config(**SIZES, **V2[case])
    model, params = check(DeepseekV2ForCausalLM, config, tmp_path, 19)
    assert ("q" in params["layers"][0]["attention"]) == (case == "lite")
    assert "mlp" in params["layers"][0] and "moe" in params["layers"][1]
    packed_equals_alone(model, params, 19)


@pytest.mark.parametrize("case", V3)
def test_v3(case, tmp_path):
    config = DeepseekV3Config(**SIZES, n_shared_experts=2, num_nextn_predict_layers=0, **V3[case])
    model, params = check(DeepseekV3ForCausalLM, config, tmp_path, 19)
    assert params["layers"][2]["moe"]["router"]["bias"].abs().sum() > 0
    packed_equals_alone(model, params, 19)


TINY = deepseek_v3.DeepSeekV3Config(
    vocab=19, layers=3, dense_layers=1, embed=8, heads=2, q_rank=6, kv_rank=4, plain_dim=4, rope_dim=2, value_dim=4,
    mlp=12, expert_mlp=4, experts=8, shared_experts=1, top_k=2, groups=4, top_groups=2, dtype=torch.float64,
    init_std=0.3,
)  # fmt: skip


def test_the_bias_balances_without_a_gradient():
    params, batch = ff.init(deepseek_v3.template(TINY)), batch_of(19, 4, 32)
    loss = deepseek_v3.loss(TINY)
    _, grads = ff.value_and_grad(loss)(params, batch)
    assert not any(p["moe"]["router"]["bias"].any() for p in grads["layers"][1:])

    def spread(params):
        load = loss(params, batch)[2]["load"]
        return load, (load.max(1).values / load.mean(1)).tolist()

    load, before = spread(params)
    for _ in range(60):
        params = deepseek_v3.nudge(params, load, rate=0.01)
        load, after = spread(params)
    assert all(a < 1.5 < b for a, b in zip(after, before, strict=True)), (before, after)


def test_the_bias_is_nobodys_weight():
    params, batch = ff.init(deepseek_v3.template(TINY)), batch_of(19)
    moved = tree.map_with_path(lambda p, x: x + 5.0 if p.endswith("['router']['bias']") else x, params)
    one, two = (deepseek_v3.loss(TINY)(p, batch)[0] for p in (params, moved))
    assert torch.equal(one, two)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"groups": 3}, ["DeepSeekV3Config(experts, groups)", "8 % 3 = 2", "groups=2, or experts=9"]),
        ({"top_groups": 5}, ["5 is more than 4"]),
        ({"top_k": 5}, ["5 experts a token, out of 4 in its groups", "top_k=4 at most"]),
        ({"rope_dim": 3}, ["3 features, an odd number", "rope_dim=4"]),
        ({"dense_layers": 4}, ["4 is more than 3"]),
        ({"q_rank": 0}, ["q_rank is 0"]),
    ],
)
def test_a_bad_config_is_refused(change, words):
    with pytest.raises(ShapeError) as error:
        dataclasses.replace(TINY, **change)
    for word in words:
        assert word in str(error.value)
