"""The cache against recomputing: each further token has the logits that its whole text would give it."""

import dataclasses
import functools as ft

import pytest
import torch

import fx_feather as ff
import layouts
from fx_feather import tree
from fx_feather.errors import ShapeError
from fx_feather.models import deepseek_v2, deepseek_v3, gpt2, llama, mixtral, presets, qwen3, qwen3_moe
from fx_feather.models.accounting import cache_bytes
from fx_feather.nn import cache, mla, rope
from fx_feather.nn.rope_scaling import Dynamic, Yarn

WIDE = {"vocab": 13, "dtype": torch.float64, "init_std": 0.4}
GROUPED = {**WIDE, "layers": 2, "embed": 8, "heads": 4, "kv_heads": 2, "head_dim": 4}
LATENT = {
    **WIDE, "layers": 2, "dense_layers": 1, "embed": 8, "heads": 2, "kv_rank": 6, "plain_dim": 4, "rope_dim": 2,
    "value_dim": 3, "mlp": 6, "expert_mlp": 4, "experts": 8, "top_k": 2, "shared_experts": 2,
}  # fmt: skip
YARN = Yarn(factor=4.0, trained=4, mscale=1.0, mscale_all_dim=0.7)
FAMILIES = {
    "llama": (llama, llama.LlamaConfig(**GROUPED, mlp=6, rope_scaling=YARN, tied=True)),
    "qwen3": (qwen3, qwen3.Qwen3Config(**GROUPED, mlp=6)),
    "gpt2": (gpt2, gpt2.GPT2Config(**WIDE, context=9, layers=2, embed=8, heads=2, mlp=6)),
    "mixtral": (mixtral, mixtral.MixtralConfig(**GROUPED, expert_mlp=6, experts=4, capacity_factor=0.5)),
    "qwen3 moe": (qwen3_moe, qwen3_moe.Qwen3MoEConfig(**GROUPED, expert_mlp=6, experts=6, top_k=3, dense=(0,), mlp=8)),
    "deepseek v2": (deepseek_v2, deepseek_v2.DeepSeekV2Config(**LATENT, q_rank=None, groups=4, top_groups=2)),
    "deepseek v3": (deepseek_v3, deepseek_v3.DeepSeekV3Config(**LATENT, q_rank=6, rope_scaling=YARN)),
}
SEQ = 9


def random_params(family, cfg):
    """The template's initial values, with norms, biases and router biases moved off where they start."""
    g = torch.Generator().manual_seed(1)
    return tree.map(lambda p: p + 0.1 * torch.randn(p.shape, generator=g, dtype=p.dtype), ff.init(family.template(cfg)))


def forward(family, cfg, params, tokens):
    """Logits at every place of whole texts; with a cache, experts take all tokens that come."""
    if getattr(cfg, "capacity_factor", None) is not None:
        cfg = dataclasses.replace(cfg, capacity_factor=None)
    return family.forward(cfg, params, tokens, torch.arange(tokens.shape[1]).expand(tokens.shape))


def texts(rows=2, seed=0):
    return torch.randint(0, 13, (rows, SEQ), generator=torch.Generator().manual_seed(seed))


def equal(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


@pytest.fixture(params=FAMILIES)
def model(request):
    family, cfg = FAMILIES[request.param]
    return family, cfg, random_params(family, cfg)


def test_every_step_equals_recomputing(model):
    family, cfg, params = model
    tokens, positions = texts(), torch.arange(SEQ).expand(2, SEQ)
    expected = forward(family, cfg, params, tokens)
    logits, kept = family.extend(cfg, params, tokens[:, :3], positions[:, :3], length=SEQ)
    equal(logits, expected[:, 2])
    for i in range(3, SEQ):
        before = tree.map(torch.clone, kept)
        logits, after = family.extend(cfg, params, tokens[:, i : i + 1], positions[:, i : i + 1], kept)
        equal(logits, expected[:, i])
        assert all(torch.equal(a, b) for a, b in zip(tree.leaves(kept), tree.leaves(before), strict=True))
        kept = after
    template = family.cache_template(cfg, 2, SEQ)
    tree.check_same(tree.structure(template), kept, call="extend", name="kept")
    for p, x in zip(tree.leaves(template), tree.leaves(kept), strict=True):
        assert (p.shape, p.dtype) == (tuple(x.shape), x.dtype)


def test_several_tokens_at_once_and_padding_anywhere(model):
    """Rows of 5 and 2 tokens, padded on the right and on the left, then 3 more of one and 4 of the other."""
    family, cfg, params = model
    tokens = texts()
    first = torch.tensor([[0, 1, 2, 3, 4, -1], [-1, -1, -1, -1, 0, 1]])
    then = torch.tensor([[-1, 5, 6, 7], [2, 3, 4, 5]])
    at = [tokens.gather(1, p.clamp(min=0)) for p in (first, then)]
    expected = forward(family, cfg, params, tokens)
    logits, kept = family.extend(cfg, params, at[0], first, length=SEQ)
    equal(logits, torch.stack([expected[0, 4], expected[1, 1]]))
    logits, kept = family.extend(cfg, params, at[1], then, kept)
    equal(logits, torch.stack([expected[0, 7], expected[1, 5]]))
    assert all(x.isfinite().all() for x in tree.leaves(kept))


def test_a_row_that_only_holds_padding_keeps_what_it_had(model):
    family, cfg, params = model
    tokens, positions = texts(), torch.arange(4).expand(2, 4)
    _, kept = family.extend(cfg, params, tokens[:, :4], positions, length=SEQ)
    _, after = family.extend(cfg, params, tokens[:, 4:5], torch.tensor([[4], [-1]]), kept)
    for a, b in zip(tree.leaves(kept), tree.leaves(after), strict=True):
        assert torch.equal(a[1], b[1])
        assert not torch.equal(a[0], b[0])


LAYOUTS = {
    "tp": (ff.Mesh(tp=2), layouts.tp("tp")),
    "fsdp | tp": (ff.Mesh(dp=2, tp=2), layouts.fsdp("dp") | layouts.tp("tp")),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_split_by_a_layout(model, name):
    (family, cfg, params), (mesh, layout) = model, LAYOUTS[name]
    tokens, positions = texts(), torch.arange(SEQ).repeat(2, 1)
    template = family.cache_template(cfg, 2, SEQ)
    setup = {"template": family.template(cfg), "mesh": mesh, "layout": layout}
    prompt = {"tokens": tokens[:, :3], "positions": positions[:, :3]}
    prefill = ff.compile(
        lambda p, b: family.extend(cfg, p, b["tokens"], b["positions"], length=SEQ), batch=prompt, **setup
    )
    logits, kept = prefill.simulate(params, prompt)
    names = tree.map(lambda p: p.dims, template)
    decode = ff.compile(
        lambda p, b: family.extend(cfg, p, b["tokens"], b["positions"], b["kept"]),
        batch={"tokens": tokens[:, :1], "positions": positions[:, :1], "kept": kept},
        batch_dims={"tokens": "batch seq", "positions": "batch seq", "kept": names},
        **setup,
    )
    # What comes out is split as what goes in, so that a rank hands its own part on.
    kept_in = [t for path, t in zip(decode.batch.paths, decode.batch.types, strict=True) if "kept" in path]
    for out in (prefill.out_types, decode.out_types):
        assert [t.dims for t in tree.leaves(out[1])] == [t.dims for t in kept_in]
    if "k" in template[0]:
        assert {t.dims[1] for t in kept_in} == {("tp",)}
    expected = forward(family, cfg, params, tokens)
    equal(logits, expected[:, 2])
    for i in range(3, 6):
        batch = {"tokens": tokens[:, i : i + 1], "positions": positions[:, i : i + 1], "kept": kept}
        logits, kept = decode.simulate(params, batch)
        equal(logits, expected[:, i])


def test_absorbed_latent_attention_equals_the_expanded_one():
    sizes = {"kv_rank": 5, "plain_dim": 4, "rope_dim": 2, "value_dim": 3, "dtype": torch.float64}
    for q_rank in (None, 4):
        params = ff.init(mla.template(8, 3, q_rank=q_rank, std=0.5, **sizes))
        h = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        positions = torch.arange(6).expand(2, 6)
        tables = rope.tables(positions, 2, dtype=torch.float64, pairing="neighbours")
        expected = mla.mla(params, h, *tables, score_factor=1.3)
        empty = tree.map(
            lambda p: torch.zeros(p.shape, dtype=p.dtype), cache.latent_template(2, 6, 5, 2, dtype=torch.float64)
        )
        run = ft.partial(mla.cached, params, h, *tables, score_factor=1.3)
        expanded, _ = run(cache.places(positions, 6, new=True))
        absorbed, kept = run(cache.places(positions, 6, new=False), empty)
        torch.testing.assert_close(expanded, expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(absorbed, expected, rtol=0, atol=1e-12)
        assert {name: x.shape[-1] for name, x in kept.items()} == {"latent": 5, "k_rope": 2}


def test_what_is_kept_in_another_dtype_is_computed_in_the_models():
    family, cfg = FAMILIES["llama"]
    params, tokens = random_params(family, cfg), texts()
    positions = torch.arange(4).expand(2, 4)
    _, kept = family.extend(cfg, params, tokens[:, :4], positions, length=SEQ)
    narrow = tree.map(lambda x: x.to(torch.bfloat16), kept)
    logits, after = family.extend(cfg, params, tokens[:, 4:5], torch.full((2, 1), 4), narrow)
    assert logits.dtype == torch.float64 and after[0]["k"].dtype == torch.bfloat16
    torch.testing.assert_close(logits, forward(family, cfg, params, tokens)[:, 4], rtol=0, atol=0.05)


def test_bytes_per_token_are_those_of_the_architecture():
    def of(family, cfg):
        found = cache.bytes_per_token(family.cache_template(cfg, batch=3, length=5))
        assert found == cache_bytes(family.template(cfg))
        return found

    mha, gqa, v2, v3 = (presets.PRESETS[n] for n in ("Llama-2-7B", "Llama-3-8B", "DeepSeek-V2", "DeepSeek-V3"))
    assert of(llama, mha) == 2 * 32 * 32 * 128 * 2
    assert of(llama, gqa) == 2 * 32 * 8 * 128 * 2
    assert of(deepseek_v2, v2) == 60 * (512 + 64) * 2
    assert of(deepseek_v3, v3) == 61 * (512 + 64) * 2
    assert of(mixtral, presets.PRESETS["Mixtral-8x7B"]) == 2 * 32 * 8 * 128 * 2
    assert of(qwen3_moe, presets.PRESETS["Qwen3-30B-A3B"]) == 2 * 48 * 4 * 128 * 2
    assert of(gpt2, gpt2.GPT2Config()) == 2 * 12 * 768 * 4
    assert cache.bytes_per_token(llama.cache_template(gqa, 1, 8, torch.float32)) == 2 * 32 * 8 * 128 * 4


@pytest.mark.parametrize(
    ("family", "cfg", "length", "words"),
    [
        (*FAMILIES["llama"], 0, ["length=0", "a cache of 0 places", "1 .. any number"]),
        (*FAMILIES["gpt2"], 10, ["length=10", "1 .. 9", "learned positions", "length=9"]),
        (
            llama,
            llama.LlamaConfig(**GROUPED, mlp=6, rope_scaling=Dynamic(factor=2.0, trained=4)),
            5,
            ["length=5", "1 .. 4", "dynamic RoPE", "length=4"],
        ),
    ],
)
def test_a_cache_of_impossible_length_is_refused(family, cfg, length, words):
    with pytest.raises(ShapeError) as error:
        family.extend(cfg, random_params(family, cfg), texts()[:, :2], torch.tensor([[0, 1]] * 2), length=length)
    for word in [*words, "extend(", "got:", "problem:", "rule:", "fix:"]:
        assert word in str(error.value)
