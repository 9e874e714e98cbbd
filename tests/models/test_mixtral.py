"""Mixtral and Qwen3 with experts against the reference implementations, their balance loss too."""

import dataclasses

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import fx_feather as ff
from fx_feather import tree
from fx_feather.errors import ShapeError
from fx_feather.models import mixtral
from fx_feather.nn.balance import Penalties
from tests.models.reference import batch_of, check, packed_equals_alone

SIZES = {
    "vocab_size": 19,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize("balanced", [False, True])
def test_mixtral(balanced, tmp_path):
    config = MixtralConfig(
        **SIZES, intermediate_size=12, num_local_experts=4, num_experts_per_tok=2,
        output_router_logits=balanced, router_aux_loss_coef=0.5,
    )  # fmt: skip
    model, params = check(MixtralForCausalLM, config, tmp_path, 19)
    assert model.config.penalties.pooled == (0.5 if balanced else 0)
    packed_equals_alone(model, params, 19)


@pytest.mark.parametrize("normalize", [False, True])
def test_qwen3_moe(normalize, tmp_path):
    config = Qwen3MoeConfig(
        **SIZES, head_dim=6, intermediate_size=20, moe_intermediate_size=8, num_experts=8, num_experts_per_tok=3,
        norm_topk_prob=normalize, output_router_logits=True, router_aux_loss_coef=0.1,
    )  # fmt: skip
    model, params = check(Qwen3MoeForCausalLM, config, tmp_path, 19)
    assert model.config.normalize is normalize and "q_norm" in params["layers"][0]["attention"]
    packed_equals_alone(model, params, 19)


@pytest.mark.parametrize(("only", "step", "dense"), [([0], 1, (0,)), ([], 2, (0, 2)), ([3], 2, (0, 2, 3))])
def test_qwen3_moe_with_dense_layers_in_between(only, step, dense, tmp_path):
    config = Qwen3MoeConfig(
        **SIZES | {"num_hidden_layers": 4}, head_dim=6, intermediate_size=20, moe_intermediate_size=8, num_experts=8,
        num_experts_per_tok=3, norm_topk_prob=True, output_router_logits=True, router_aux_loss_coef=0.1,
        mlp_only_layers=only, decoder_sparse_step=step,
    )  # fmt: skip
    model, params = check(Qwen3MoeForCausalLM, config, tmp_path, 19)
    assert model.config.dense == dense
    assert ["mlp" in p for p in params["layers"]] == [i in dense for i in range(4)]
    packed_equals_alone(model, params, 19)


@pytest.mark.parametrize("wrong", [{"dense": (2,), "mlp": 4}, {"dense": (1, 1), "mlp": 4}, {"dense": (1,)}])
def test_dense_layers_that_are_not_there(wrong):
    with pytest.raises(ShapeError, match=r"dense|mlp"):
        mixtral.MixtralConfig(vocab=8, layers=2, embed=8, heads=2, kv_heads=1, expert_mlp=4, experts=2, **wrong)


TINY = mixtral.MixtralConfig(
    vocab=19, layers=3, embed=8, heads=2, kv_heads=1, expert_mlp=6, experts=4, dtype=torch.float64, init_std=0.3
)


def run(cfg, params, batch):
    (out, grads) = ff.value_and_grad(mixtral.loss(cfg))(params, batch)
    return out, grads


def test_load_counts_every_choice_once():
    out, _ = run(TINY, ff.init(mixtral.template(TINY)), batch_of(19))
    load = out["aux"]["load"]
    assert load.shape == (3, 4) and (load.sum(1) == 2 * 12 * 2).all()


@pytest.mark.parametrize("name", ["per_layer", "pooled", "sequence", "z"])
def test_each_penalty_reaches_the_routers(name):
    params, batch = ff.init(mixtral.template(TINY)), batch_of(19)
    plain, grads = run(TINY, params, batch)
    cfg = dataclasses.replace(TINY, penalties=Penalties(**{name: 2.0}))
    out, more = run(cfg, params, batch)
    extra = out["aux"]["penalty"] / out["count"]
    assert extra > 0
    torch.testing.assert_close(out["loss"], plain["loss"] + extra)
    for one, two in zip(grads["layers"], more["layers"], strict=True):
        assert not torch.allclose(one["moe"]["router"]["weight"], two["moe"]["router"]["weight"])
    # The last experts' outputs are not routed again, so no penalty reaches them.
    torch.testing.assert_close(
        grads["layers"][-1]["moe"]["experts"]["down"], more["layers"][-1]["moe"]["experts"]["down"]
    )


def test_room_for_all_is_dropless_and_less_room_is_not():
    params, batch = ff.init(mixtral.template(TINY)), batch_of(19)
    _, dropless = run(TINY, params, batch)
    _, roomy = run(dataclasses.replace(TINY, capacity_factor=4.0), params, batch)
    for a, b in zip(tree.leaves(dropless), tree.leaves(roomy), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    _, tight = run(dataclasses.replace(TINY, capacity_factor=0.5), params, batch)
    assert any(not torch.allclose(a, b) for a, b in zip(tree.leaves(dropless), tree.leaves(tight), strict=True))


def test_all_faults_of_a_config_are_listed_at_once():
    with pytest.raises(ShapeError, match=r"^3 problems:") as error:
        dataclasses.replace(TINY, top_k=5, kv_heads=0, capacity_factor=-1.0)
    for word in ("5 is more than 4", "kv_heads is 0", "capacity_factor is -1.0"):
        assert word in str(error.value)
