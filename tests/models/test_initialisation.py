"""Initial values: the stream's variance stays flat with depth, and the first loss is that of a uniform guess."""

import math

import pytest
import torch

import fx_feather as ff
from fx_feather import tree
from fx_feather.hf import Model
from fx_feather.models import deepseek_v2, gpt2, llama, mixtral, qwen3
from tests.models.reference import batch_of

SIZES = {"vocab": 64, "embed": 64, "heads": 4}
GROUPED = {**SIZES, "kv_heads": 2}
# A deviation of 1 / sqrt(embed) keeps the variance of what a projection reads; 0.02 does for widths near 2048.
STD = 1 / math.sqrt(64)


def config(name, layers):
    start = {"layers": layers, "init_std": STD}
    match name:
        case "llama":
            return llama.LlamaConfig(**GROUPED, mlp=128, **start)
        case "qwen3":
            return qwen3.Qwen3Config(**GROUPED, mlp=128, head_dim=16, **start)
        case "gpt2":
            return gpt2.GPT2Config(**SIZES, context=32, **start)
        case "mixtral":
            return mixtral.MixtralConfig(**GROUPED, expert_mlp=64, experts=4, **start)
    return deepseek_v2.DeepSeekV2Config(
        **SIZES, dense_layers=1, q_rank=32, kv_rank=32, plain_dim=16, rope_dim=8, value_dim=16, mlp=128, expert_mlp=64,
        experts=4, shared_experts=1, top_k=2, **start,
    )  # fmt: skip


FAMILIES = ["llama", "qwen3", "gpt2", "mixtral", "deepseek v2"]


def last_stream(name, layers):
    """The mean square of the stream before the last norm, measured with a norm that does nothing."""
    model = Model(config(name, layers))
    params, seen = ff.init(model.template), []
    batch = batch_of(64, 4, 32)

    def spy(weight, x, *rest):
        seen.append(x)
        return real(weight, x, *rest)

    from fx_feather.nn import norm

    kind = "layer_norm" if name == "gpt2" else "rms_norm"
    real = getattr(norm, kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(norm, kind, spy)
        model.apply(params, batch["tokens"])
    return seen[-1].square().mean().item() / seen[0].square().mean().item()


@pytest.mark.parametrize("name", FAMILIES)
def test_the_streams_variance_stays_flat_with_depth(name):
    shallow, deep = last_stream(name, 2), last_stream(name, 24)
    assert 0.5 < deep / shallow < 2, (shallow, deep)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_writes_to_the_stream_starts_smaller_by_the_root_of_twice_the_depth(name):
    model = Model(config(name, 8))
    for path, p in zip(tree.paths(model.template), tree.leaves(model.template), strict=True):
        if path.endswith(("['o']", "['down']")):
            assert math.isclose(p.init.std, STD / 4), path
        elif len(p.shape) > 1 and "bias" not in path:
            assert math.isclose(p.init.std, STD), path


@pytest.mark.parametrize("name", FAMILIES)
def test_the_first_loss_is_near_that_of_a_uniform_guess(name):
    cfg = config(name, 2)
    model = Model(type(cfg)(**{**vars(cfg), "init_std": 0.02}))
    total, count, *_ = model.loss(ff.init(model.template), batch_of(64, 8, 32))
    assert abs(total / count - math.log(64)) < 0.1


def test_a_projection_without_a_deviation_keeps_the_variance_of_its_input():
    from fx_feather.nn import mlp, moe

    x = torch.randn(512, 64)
    for weight in (mlp.template(64, 256)["up"], moe.template(64, 256, 2)["gate"]):
        w = ff.init({"w": weight})["w"].reshape(-1, 64, 256)[0]
        assert math.isclose((x @ w).var().item(), 1, rel_tol=0.05)
