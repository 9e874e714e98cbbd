"""Sizes and costs: those that are published, and those that a count of operations gives."""

import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import fx_feather as ff
from fx_feather.errors import ShapeError
from fx_feather.hf import Model
from fx_feather.models import accounting, deepseek_v3, gpt2, llama, mixtral
from fx_feather.models.presets import PRESETS

# Numbers of parameters in the checkpoints, and as they are published, in billions.
TOTALS = {
    "Llama-2-7B": (6738415616, "6.74"),
    "Llama-3-8B": (8030261248, "8.03"),
    "Llama-3-70B": (70553706496, "70.6"),
    "Llama-3.1-405B": (405853388800, "406"),
    "Mixtral-8x7B": (46702792704, "46.7"),
    "Qwen3-30B-A3B": (30532122624, "30.5"),
    "DeepSeek-V2-Lite": (15706484224, "15.7"),
    "DeepSeek-V2": (235741434880, "236"),
    "DeepSeek-V3": (671026419200, "671"),
}


def counted(name):
    return accounting.size(Model(PRESETS[name]).template, getattr(PRESETS[name], "top_k", None))


def rounded(number, like):
    return f"{number / 1e9:.{len(like.partition('.')[2])}f}"


@pytest.mark.parametrize("name", PRESETS)
def test_totals_are_those_published(name):
    exact, published = TOTALS[name]
    size = counted(name)
    assert size.total == exact == sum(size.parts.values())
    assert rounded(size.total, published) == published


@pytest.mark.parametrize(("name", "published"), [("Mixtral-8x7B", "12.9"), ("DeepSeek-V2", "21")])
def test_active_parameters_are_those_published(name, published):
    assert rounded(counted(name).active, published) == published


def test_active_parameters_of_deepseek_v3_are_published_without_the_embedding():
    size = counted("DeepSeek-V3")
    assert rounded(size.active - size.parts["embed"], "37") == "37"


def test_the_cache_of_latents_is_small():
    # 576 numbers a layer against 2 * 128 heads * 128 (DeepSeek-V2, table 1).
    assert accounting.cache_bytes(Model(PRESETS["DeepSeek-V2"]).template) == 60 * (512 + 64) * 2
    assert accounting.cache_bytes(Model(PRESETS["Llama-3-8B"]).template) == 32 * 2 * 8 * 128 * 2
    assert accounting.cache_bytes(Model(PRESETS["Llama-2-7B"]).template) == 32 * 2 * 32 * 128 * 2
    assert accounting.cache_bytes(gpt2.template(gpt2.GPT2Config())) == 12 * 2 * 768 * 4


CONFIGS = {
    "llama": llama.LlamaConfig(vocab=32, layers=2, embed=8, heads=4, kv_heads=2, mlp=12, tied=True, qk_norm=True),
    "gpt2": gpt2.GPT2Config(vocab=32, context=8, layers=2, embed=8, heads=2),
    "mixtral": mixtral.MixtralConfig(vocab=32, layers=2, embed=8, heads=4, kv_heads=2, expert_mlp=6, experts=4),
    "deepseek v3": deepseek_v3.DeepSeekV3Config(
        vocab=32, layers=2, dense_layers=1, embed=8, heads=2, q_rank=6, kv_rank=4, plain_dim=4, rope_dim=2, value_dim=4,
        mlp=12, expert_mlp=4, experts=4, shared_experts=2, top_k=2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_flops_are_those_of_the_products_that_run(name, monkeypatch):
    cfg = CONFIGS[name]
    model, seq = Model(cfg), 8
    params, tokens = ff.init(model.template), torch.zeros(3, seq, dtype=torch.long)
    if hasattr(cfg, "experts"):
        # Grouped matmuls are counted by their rows, which the counter of torch does not know.
        def rows(x, w, ends):
            return torch.matmul(x.unsqueeze(1), w[:1].expand(x.shape[0], -1, -1)).squeeze(1)

        # The package has a function of the module's name.
        monkeypatch.setattr(sys.modules["fx_feather.kernels.experts"], "grouped_matmul", rows)
    # The counter knows the operators that this one is made of.
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.apply(params, tokens)
    cost = accounting.flops(model.template, seq, getattr(cfg, "top_k", None), attention="full")
    assert counter.get_total_flops() == 3 * seq * cost.forward
    assert cost.training == 3 * cost.forward


def test_six_n_names_its_convention():
    template = llama.template(CONFIGS["llama"])
    size = accounting.size(template)
    assert accounting.six_n(template, embeddings=True).training == 6 * size.total
    assert accounting.six_n(template).training == 6 * (size.total - size.parts["embed"])
    experts = mixtral.template(CONFIGS["mixtral"])
    assert accounting.six_n(experts, 2, embeddings=True).forward == 2 * accounting.size(experts, 2).active


def test_causal_attention_costs_about_half():
    template = Model(PRESETS["Llama-3-8B"]).template
    none, causal, full = (
        accounting.flops(template, s, attention=a).forward for s, a in ((0, "full"), (8192, "causal"), (8192, "full"))
    )
    assert full - none == 4 * 32 * 32 * 128 * 8192
    assert causal - none == 2 * 32 * 32 * 128 * 8193


def test_experts_need_a_top_k():
    with pytest.raises(ShapeError, match=r"None is not in 1 \.\. 4"):
        accounting.size(mixtral.template(CONFIGS["mixtral"]))
