"""Law: a model on any mesh, split by any composition of layouts, is the model on one device, leaf by leaf."""

import dataclasses
import itertools
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import fx_feather as ff
import layouts
from fx_feather import testing
from fx_feather.models import llama
from fx_feather.passes import parts


@pytest.fixture(scope="module", autouse=True)
def sums_in_parts():
    """Values of these sizes too are summed in parts, for their norm, where several ranks hold them alike."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "WORTH_PARTS", 1)
        yield


DATA = ("ddp", "zero1", "zero2", "fsdp")
TENSOR = ("tp", "tp_sp")
KINDS = {name: getattr(layouts, name) for name in (*DATA, *TENSOR)}
EXAMPLES = settings().max_examples
ADAMW = ff.chain(ff.clip_by_global_norm(0.3), ff.adamw(lr=ff.warmup_cosine(1e-2, 2, 10), weight_decay=0.1))

# Sizes that no axis divides wherever any size will do: vocabulary, embed, layers.
MODEL = llama.LlamaConfig(
    vocab=11, layers=2, embed=7, heads=4, kv_heads=2, head_dim=4, mlp=6, qk_norm=True, dtype=torch.float64
)


def batch(cfg: llama.LlamaConfig, rows: int, seq: int) -> dict[str, torch.Tensor]:
    """Tokens and targets over the whole vocabulary; the first row counts for nothing, the second in part."""
    g = torch.Generator().manual_seed(0)
    tokens, targets = torch.randint(0, cfg.vocab, (2, rows, seq), generator=g)
    targets[0] = -100
    targets[1 % rows, : seq // 2] = -100 if rows > 1 else 0
    return {"tokens": tokens, "targets": targets, "positions": torch.arange(seq).expand(rows, seq).contiguous()}


def grid() -> dict[str, tuple[ff.Mesh, ff.Layout]]:
    """Every composition of up to three axes: one or two of data, then one of tensors."""
    names = [(), *((k,) for k in KINDS), *itertools.product(DATA, (*DATA, *TENSOR))]
    names += itertools.product(DATA, DATA, TENSOR)
    out = {}
    for kinds in names:
        mesh = ff.Mesh(**dict.fromkeys("abc"[: len(kinds)], 2))
        layout = layouts.single()
        for kind, axis in zip(kinds, mesh.axes, strict=True):
            layout = layout | KINDS[kind](axis)
        out[" | ".join(kinds) or "single"] = (mesh, layout)
    return out


GRID = grid()
# Those that are trained with; the others are compared in loss and gradients.
PAIRS = ("ddp | fsdp", "zero1 | fsdp", "fsdp | zero2", *(f"{d} | {t}" for d in DATA for t in TENSOR))
TRAINED = ["single", *KINDS, *PAIRS, "ddp | fsdp | tp_sp"]


@pytest.mark.parametrize("name", GRID)
def test_every_composition_is_one_device(name: str) -> None:
    mesh, layout = GRID[name]
    testing.assert_equivalent(
        llama.loss(MODEL),
        template=llama.template(MODEL),
        batch=batch(MODEL, 8, 4),
        mesh=mesh,
        layout=layout,
        optimizer=ADAMW if name in TRAINED else None,
    )


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, how it is split, and a batch of it."""

    cfg: llama.LlamaConfig
    mesh: ff.Mesh
    layout: ff.Layout
    batch: Any
    settings: dict[str, Any]


@st.composite
def cases(draw: st.DrawFn, most: int, accumulate: bool) -> Case:
    mesh, layout = draw(testing.parallelisms(most, ("r", "dp", "tp"), {"single": lambda axis: ff.Layout(), **KINDS}))

    def ranks(dim: str) -> int:
        return mesh.count(layout.compute.get(dim, ()))

    kv_heads = ranks("kv_heads") * draw(st.integers(1, 2))
    cfg = llama.LlamaConfig(
        vocab=draw(st.integers(2, 17)),
        layers=draw(st.integers(1, 3)),
        embed=draw(st.integers(1, 9)),
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim=2 * draw(st.integers(1, 2)),
        mlp=ranks("mlp") * draw(st.integers(1, 3)),
        qk_norm=draw(st.booleans()),
        tied=draw(st.booleans()),
        dtype=torch.float64,
    )
    extra: dict[str, Any] = {}
    if accumulate:
        extra["accumulate"] = draw(st.integers(1, 3))
        extra["remat"] = draw(st.sampled_from(["none", "selective", "full", 2000]))
        extra["prefetch_bytes"] = draw(st.sampled_from([None, 0, 1 << 30]))
        extra["bucket_bytes"] = draw(st.sampled_from([1, 1000, 25 << 20]))
    extra["reshard"] = draw(st.booleans())
    rows = ranks("batch") * extra.get("accumulate", 1) * draw(st.integers(1, 2))
    seq = ranks("residual_seq") * draw(st.integers(1, 3))
    like = batch(cfg, rows, seq)
    like["tokens"].view(-1)[:1], like["targets"].view(-1)[-1:] = cfg.vocab - 1, cfg.vocab - 1
    like["targets"] = like["targets"].clamp(min=0)
    return Case(cfg, mesh, layout, draw(testing.batches(like, {"targets": -100})), extra)


def hold(case: Case, **more: Any) -> None:
    testing.assert_equivalent(
        llama.loss(case.cfg),
        template=llama.template(case.cfg),
        batch=case.batch,
        mesh=case.mesh,
        layout=case.layout,
        **case.settings,
        **more,
    )


@pytest.mark.timeout(1200)
@settings(max_examples=EXAMPLES // 8)
@given(case=cases(16, accumulate=False))
def test_loss_and_gradients_of_any_model(case: Case) -> None:
    hold(case)


@pytest.mark.timeout(1200)
@settings(max_examples=EXAMPLES // 8)
@given(case=cases(16, accumulate=True), steps=st.just(3))
def test_training_of_any_model(case: Case, steps: int) -> None:
    hold(case, optimizer=ADAMW, steps=steps)


@pytest.mark.parametrize("name", KINDS)
def test_the_strategies_know_the_layouts(name: str) -> None:
    for axes in ("a", "tp"):
        assert testing.KINDS[name](axes) == KINDS[name](axes)
    assert layouts.hsdp("a", "b") == testing.compositions(ff.Mesh(a=2, b=2))["ddp@a | fsdp@b"]
