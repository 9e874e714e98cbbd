"""What one rank runs is what the simulation computes: memory reused, tiles and all."""

from typing import Any

import pytest
import torch

import fx_feather as ff
import layouts
from fx_feather import optim, runtime, tiles, tree, world
from fx_feather.models import deepseek_v3, gpt2, llama
from tests.runtime.jobs import linear_batch, linear_step

F64: dict[str, Any] = {"vocab": 11, "layers": 2, "embed": 8, "heads": 2, "dtype": torch.float64}
MODELS = {
    "llama": (llama, llama.LlamaConfig(**F64, kv_heads=1, mlp=12, qk_norm=True, tied=True)),
    "gpt2": (gpt2, gpt2.GPT2Config(**F64, context=8)),
    "deepseek v3": (
        deepseek_v3,
        deepseek_v3.DeepSeekV3Config(
            **F64, dense_layers=1, kv_rank=6, plain_dim=4, rope_dim=2, value_dim=4, mlp=12, expert_mlp=6, experts=4,
            top_k=2, q_rank=None, shared_experts=1,
        ),
    ),
}  # fmt: skip


OPTIMIZERS = {
    "adamw": ff.adamw(lr=1e-2),
    "adam in parts": ff.chain(ff.clip_by_global_norm(0.1), optim.scale_by_adam(), optim.scale(-1e-2)),
    "momentum": ff.sgd(lr=1e-2, momentum=0.9, nesterov=True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_runs_as_simulated(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In tiles or at once, over what it may write over, in a dtype that the fused kernel takes and in another."""
    monkeypatch.setattr(tiles, "TILE", 16)
    template = {"w": ff.Param("embed _", (9, 13), ff.normal(1.0), dtype), "b": ff.Param("_", (13,), ff.ones(), dtype)}

    def loss(params, batch):
        return ((batch.to(dtype) @ params["w"] + params["b"]).float() ** 2).sum(), torch.tensor(batch.shape[0])

    batch = torch.linspace(-1, 1, 36).reshape(4, 9)
    settings = {"template": template, "mesh": ff.Mesh(), "layout": ff.Layout(), "batch": batch}
    step = ff.compile_step(loss, OPTIMIZERS[name], **settings, batch_dims="batch _", device="cpu")
    run, simulated = step.init(seed=0), step.init(seed=0)
    for _ in range(4):
        run, _ = step(run, batch)
        simulated, _ = step.simulate(simulated, batch)
        both = zip(tree.leaves((run.params, run.opt)), tree.leaves((simulated.params, simulated.opt)), strict=True)
        for a, b in both:
            torch.testing.assert_close(a, b, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("remat", ["none", "selective", "full"])
def test_a_rank_runs_what_is_simulated(name: str, remat: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles are made small, so that even these leaves are taken in several."""
    monkeypatch.setattr(tiles, "TILE", 16)
    module, cfg = MODELS[name]
    tokens = torch.randint(0, 11, (4, 8), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": tokens, "targets": tokens.roll(1, 1), "positions": torch.arange(8).repeat(4, 1)}
    step = ff.compile_step(
        module.loss(cfg),
        ff.chain(ff.clip_by_global_norm(0.1), ff.adamw(lr=1e-2)),
        template=module.template(cfg),
        mesh=ff.Mesh(),
        layout=layouts.single(),
        batch=batch,
        accumulate=2,
        remat=remat,
    )
    run, simulated = step.init(seed=0), step.init(seed=0)
    for _ in range(3):
        run, one = step(run, step.shard(batch))
        simulated, other = step.simulate(simulated, batch)
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-13)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-12)
    for path, a, b in zip(tree.paths(run.params), tree.leaves(run.params), tree.leaves(simulated.params), strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12), path
    over = {f.name: form.over for f, form in step.runtime()._overwriting.items() if f.name.endswith("backward")}
    assert over, "no backward writes over what was kept for it"


def test_holes_in_the_heap_go_back_after_the_first_step_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    step, calls = linear_step(ff.Mesh(), ff.Layout()), []
    run = step.runtime()
    monkeypatch.setattr(runtime, "give_back", lambda: calls.append(state.step))
    state, batch = step.init(), linear_batch()
    for _ in range(3):
        state, _ = step(state, batch)
    assert calls == [0]
    # What is remembered of the values that were made does not grow with the steps.
    run._too_many = 0
    state, _ = step(state, batch)
    few = len(run._made)
    for _ in range(50):
        run._too_many = min(run._too_many, 20)
        state, _ = step(state, batch)
    assert len(run._made) <= few + 30
    assert all(run._gave(x) for x in tree.leaves(state.params))


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "1e30"])
def test_a_timeout_that_is_no_time_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FX_FEATHER_TIMEOUT", text)
    with pytest.raises(ff.FeatherError, match="is no number of seconds"):
        world.timeout()
    monkeypatch.setenv("FX_FEATHER_TIMEOUT", "2.5")
    assert world.timeout().total_seconds() == 2.5
