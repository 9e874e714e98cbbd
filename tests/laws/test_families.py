"""Law: every family of models, split by layouts of data, tensors, sequence and experts, is the model on one device."""

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import fx_feather as ff
import layouts
from fx_feather import testing
from fx_feather.models import deepseek_v2, deepseek_v3, gpt2, llama, mixtral, qwen3, qwen3_moe
from fx_feather.nn import balance
from fx_feather.nn.balance import NONE, Penalties
from fx_feather.nn.rope_scaling import Dynamic, Yarn

F64: dict[str, Any] = {"vocab": 13, "dtype": torch.float64, "init_std": 0.3}
EVERY = Penalties(per_layer=0.1, pooled=0.2, sequence=0.3, z=0.01)
GROUPED: dict[str, Any] = {**F64, "layers": 1, "embed": 8, "heads": 4, "kv_heads": 2, "head_dim": 4}
LATENT: dict[str, Any] = {
    **F64, "layers": 2, "dense_layers": 1, "embed": 8, "heads": 2, "kv_rank": 6, "plain_dim": 4, "rope_dim": 2,
    "value_dim": 3, "mlp": 6, "expert_mlp": 4, "experts": 8, "top_k": 2, "shared_experts": 2, "penalties": EVERY,
}  # fmt: skip
YARN = Yarn(factor=4.0, trained=4, mscale=1.0, mscale_all_dim=0.7)

DENSE: dict[str, tuple[Any, Any]] = {
    "llama, dynamic": (
        llama,
        llama.LlamaConfig(**GROUPED, mlp=6, rope_scaling=Dynamic(factor=2.0, trained=4), tied=True),
    ),
    "qwen3": (qwen3, qwen3.Qwen3Config(**GROUPED, mlp=6)),
    "gpt2": (gpt2, gpt2.GPT2Config(**F64, context=8, layers=1, embed=8, heads=2, mlp=6)),
}
EXPERTS: dict[str, tuple[Any, Any]] = {
    "mixtral": (mixtral, mixtral.MixtralConfig(**GROUPED, expert_mlp=6, experts=4, penalties=EVERY)),
    "mixtral, limited": (
        mixtral,
        mixtral.MixtralConfig(**GROUPED, expert_mlp=6, experts=4, penalties=EVERY, capacity_factor=0.7),
    ),
    "qwen3 moe": (
        qwen3_moe,
        qwen3_moe.Qwen3MoEConfig(**GROUPED | {"layers": 2}, expert_mlp=6, experts=6, top_k=3, dense=(1,), mlp=8),
    ),
    "deepseek v2": (deepseek_v2, deepseek_v2.DeepSeekV2Config(**LATENT, q_rank=None, groups=4, top_groups=2)),
    "deepseek v3": (
        deepseek_v3,
        deepseek_v3.DeepSeekV3Config(**LATENT, q_rank=6, groups=2, top_groups=1, rope_scaling=YARN),
    ),
}
FAMILIES = DENSE | EXPERTS

DDP = (ff.Mesh(dp=2), layouts.ddp("dp"))
SPLITS: dict[str, tuple[ff.Mesh, ff.Layout]] = {
    "hsdp": (ff.Mesh(replica=2, shard=2), layouts.hsdp()),
    "fsdp | tp_sp": (ff.Mesh(dp=2, tp=2), layouts.fsdp("dp") | layouts.tp_sp("tp")),
}
# Sequences split inside of attention: keys and values, or latents, are gathered.
CONTEXT_SPLITS: dict[str, tuple[ff.Mesh, ff.Layout]] = {
    "fsdp | cp, documents": (ff.Mesh(dp=2, cp=2), layouts.fsdp("dp") | layouts.cp("cp")),
    "cp | tp_sp": (ff.Mesh(cp=3, tp=2), layouts.cp("cp") | layouts.tp_sp("tp")),
}
# Experts split with partial outputs: among ranks, inside of each, or both.
EXPERT_SPLITS: dict[str, tuple[ff.Mesh, ff.Layout]] = {
    "experts": (ff.Mesh(dp=2, ep=2), layouts.fsdp("dp") | ff.Layout(compute={"expert": "ep"})),
    "experts, and tensors in and outside of them": (
        ff.Mesh(ep=2, tp=2),
        layouts.tp_sp("tp") | ff.Layout(compute={"expert": "ep", "expert_mlp": "tp"}),
    ),
}


def batch(documents: bool = False) -> dict[str, torch.Tensor]:
    """Four sequences, one of which has no targets; with documents, two in each."""
    g = torch.Generator().manual_seed(0)
    tokens, targets = torch.randint(0, 13, (2, 4, 6), generator=g)
    targets[0, :4] = -100
    targets[3] = -100
    out = {"tokens": tokens, "targets": targets, "positions": torch.arange(6).repeat(4, 1)}
    if documents:
        out["positions"] = torch.tensor([0, 1, 0, 1, 2, 3]).repeat(4, 1)
        out["documents"] = torch.tensor([5, 5, 2, 2, 2, 2]).repeat(4, 1)
    return out


def check(name: str, mesh: ff.Mesh, layout: ff.Layout, documents: bool = False, **options: Any) -> None:
    module, cfg = FAMILIES[name]
    example = batch(documents)
    testing.assert_equivalent(
        module.loss(cfg), template=module.template(cfg), batch=example, mesh=mesh, layout=layout, **options
    )


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_one_device(name: str, split: str) -> None:
    check(name, *SPLITS[split], documents=split == "hsdp")


@pytest.mark.parametrize("name", ["mixtral", "deepseek v3"])
def test_ddp_is_one_device(name: str) -> None:
    check(name, *DDP)


@pytest.mark.parametrize("split", CONTEXT_SPLITS)
@pytest.mark.parametrize("name", [name for name in FAMILIES if "limited" not in name])
def test_split_sequences_are_one_device(name: str, split: str) -> None:
    check(name, *CONTEXT_SPLITS[split], documents="documents" in split)


def test_experts_with_a_capacity_refuse_a_split_sequence() -> None:
    with pytest.raises(ff.FeatherError, match="split by") as e:
        check("mixtral, limited", ff.Mesh(cp=2), layouts.cp("cp"))
    assert "moe.py" in str(e.value)


@pytest.mark.parametrize("split", EXPERT_SPLITS)
@pytest.mark.parametrize("name", EXPERTS)
def test_split_experts_are_one_device(name: str, split: str) -> None:
    check(name, *EXPERT_SPLITS[split])


# Not GPT-2: the gradient of its keys' bias is 0, since softmax sees no shift, and an optimizer enlarges its rounding.
@pytest.mark.parametrize("name", ["qwen3 moe", "deepseek v3"])
def test_three_steps_are_those_of_one_device(name: str) -> None:
    check(name, *SPLITS["fsdp | tp_sp"], optimizer=ff.adamw(lr=1e-2))


def test_statistics_count_each_token_once_whatever_is_recomputed_or_accumulated() -> None:
    module, cfg = FAMILIES["deepseek v3"]
    setup = {"template": module.template(cfg), "mesh": ff.Mesh(dp=2), "layout": layouts.fsdp("dp"), "batch": batch()}
    want = ff.value_and_grad(module.loss(cfg))(ff.init(module.template(cfg)), batch())[0]["aux"]["load"]
    assert (want.sum(1) == 4 * 6 * cfg.top_k).all()
    for options in ({}, {"accumulate": 2}, {"remat": "full"}, {"remat": "selective"}):
        step = ff.compile_step(module.loss(cfg), ff.adamw(lr=1e-3), **setup, **options)
        _, metrics = step.simulate(step.init(), batch())
        assert torch.equal(metrics["aux"]["load"], want)


def test_biases_are_nudged_by_the_step_itself_and_alike_in_every_layout() -> None:
    _, cfg = FAMILIES["deepseek v3"]
    runs = []
    for mesh, layout in ((ff.Mesh(), layouts.single()), SPLITS["fsdp | tp_sp"]):
        setup = {"template": deepseek_v3.template(cfg), "mesh": mesh, "layout": layout, "batch": batch()}
        step = ff.compile_step(
            deepseek_v3.loss(cfg),
            ff.adamw(lr=1e-2),
            adjust=lambda params, aux: deepseek_v3.nudge(params, aux["load"], 0.01),
            accumulate=2,
            **setup,
        )
        state, loads = step.init(), []
        for _ in range(3):
            before = state.params["layers"][1]["moe"]["router"]["bias"]
            state, metrics = step.simulate(state, batch())
            loads.append(metrics["aux"]["load"])
            moved = state.params["layers"][1]["moe"]["router"]["bias"]
            assert torch.equal(moved, balance.nudged(before, loads[-1][0], 0.01))
        runs.append((torch.stack(loads), state.params["layers"][1]["moe"]["router"]["bias"]))
    for one, two in zip(*runs, strict=True):
        assert torch.equal(one, two)
    assert runs[0][1].abs().sum() > 0


SHARDED: dict[str, Any] = {
    "single": lambda axis: ff.Layout(),
    "ddp": layouts.ddp,
    "fsdp": layouts.fsdp,
    "tp": layouts.tp,
    "tp_sp": layouts.tp_sp,
    "cp": layouts.cp,
    "experts": lambda axis: ff.Layout(compute={"expert": axis}),
    "inside experts": lambda axis: ff.Layout(compute={"expert_mlp": axis}),
}


@st.composite
def cases(draw: st.DrawFn) -> tuple[Any, Any, ff.Mesh, ff.Layout, int, int]:
    """A family, a small config of it that the layout splits evenly, and rows and length of a batch."""
    mesh, layout = draw(testing.parallelisms(8, ("dp", "ep", "tp"), SHARDED))
    layout |= ff.Layout(unused_ok=True)  # a model without experts, split over its experts

    def several(dim: str, most: int, least: int = 1) -> int:
        return mesh.count(layout.compute.get(dim, ())) * draw(st.integers(least, most))

    base: dict[str, Any] = {
        "vocab": draw(st.integers(2, 17)),
        "layers": draw(st.integers(1, 2)),
        "dtype": torch.float64,
        "init_std": 0.3,
    }
    heads = several("heads", 2)
    kv_heads = several("kv_heads", 1)
    grouped = base | {"embed": draw(st.integers(2, 9)), "heads": kv_heads * draw(st.integers(1, 2)), "head_dim": 4}
    grouped["kv_heads"] = kv_heads
    experts = several("expert", 3, 2)
    routed = {
        "expert_mlp": several("expert_mlp", 3),
        "experts": experts,
        "top_k": draw(st.integers(1, min(3, experts))),
    }
    # A limit is one of a whole sequence.
    routed["capacity_factor"] = None if "seq" in layout.compute else draw(st.sampled_from([None, 0.5, 1.0]))
    routed["penalties"] = draw(st.sampled_from([NONE, EVERY]))
    mlp = several("mlp", 3)
    latent = base | routed | {
        "embed": draw(st.integers(2, 9)), "heads": heads, "dense_layers": draw(st.integers(0, 1)), "kv_rank": 3,
        "q_rank": draw(st.sampled_from([None, 2])), "plain_dim": 3, "rope_dim": 2, "value_dim": 2, "mlp": mlp,
        # One block of the shared experts' joint size is split as a feed-forward block.
        "shared_experts": mesh.count(layout.compute.get("mlp", ())),
    }  # fmt: skip
    rows, seq = several("batch", 2), several("residual_seq", 3)
    match draw(st.sampled_from(["qwen3", "gpt2", "mixtral", "v2", "v3"])):
        case "qwen3":
            module, cfg = qwen3, qwen3.Qwen3Config(**grouped, mlp=mlp, tied=draw(st.booleans()))
        case "gpt2":
            module, cfg = gpt2, gpt2.GPT2Config(**base, context=seq, embed=heads * 2, heads=heads, mlp=mlp)
        case "mixtral":
            module, cfg = mixtral, mixtral.MixtralConfig(**grouped, **routed, normalize=draw(st.booleans()))
        case "v2":
            module, cfg = deepseek_v2, deepseek_v2.DeepSeekV2Config(**latent)
        case _:
            module, cfg = deepseek_v3, deepseek_v3.DeepSeekV3Config(**latent)
    return module, cfg, mesh, layout, rows, seq


@pytest.mark.timeout(1200)
@settings(max_examples=max(1, settings().max_examples // 8))
@given(case=cases(), documents=st.booleans())
def test_any_family_split_in_any_way_is_one_device(case: Any, documents: bool) -> None:
    module, cfg, mesh, layout, rows, seq = case
    g = torch.Generator().manual_seed(0)
    tokens, targets = torch.randint(0, cfg.vocab, (2, rows, seq), generator=g)
    example = {"tokens": tokens, "targets": targets, "positions": torch.arange(seq).repeat(rows, 1)}
    if documents:
        example["documents"] = (torch.arange(seq) >= seq // 2).long().repeat(rows, 1)
    testing.assert_equivalent(
        module.loss(cfg), template=module.template(cfg), batch=example, mesh=mesh, layout=layout
    )  # fmt: skip
