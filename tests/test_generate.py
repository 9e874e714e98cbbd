"""Generating text: equal to recomputing every token, to each prompt alone, and to one device under every layout."""

import dataclasses
import functools as ft
import json

import pytest
import torch

import fx_feather as ff
import layouts
from fx_feather.errors import GenerateError
from fx_feather.generate import Generator
from fx_feather.models import gpt2, llama, mixtral
from fx_feather.sampling import GREEDY, Sampling
from tests.models.test_cache import FAMILIES, forward, random_params
from tests.runtime.jobs import generator, written
from tests.runtime.launch import launch

PROMPTS = [[1, 2, 3], [4], [12, 0, 5, 6, 7]]
DRAWN = Sampling(temperature=1.3, top_k=9, top_p=0.95, seed=4)
NEW = 4


def made(family, cfg, texts=3, length=9, **more):
    if "layout" in more:
        more["device"] = "cpu"
    return Generator(
        ft.partial(family.extend, cfg),
        template=family.template(cfg),
        cache=family.cache_template(cfg, texts, length),
        **more,
    )


def recomputed(family, cfg, params, prompts, new, sampling=GREEDY):
    """Each text by itself, computed from its first token for every new one, with no padding and no cache."""
    out = []
    for i, prompt in enumerate(prompts):
        text = list(prompt)
        for step in range(new):
            logits = forward(family, cfg, params, torch.tensor([text]))[0, -1]
            # Of the draws for several texts the one at this text's place is its own.
            text.append(int(sampling.choose(logits.expand(i + 1, -1), step)[i]))
        out.append(text[len(prompt) :])
    return out


@pytest.mark.parametrize("sampling", [Sampling(), DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("name", FAMILIES)
def test_unequal_prompts_are_continued_as_if_recomputed(name, sampling):
    family, cfg = FAMILIES[name]
    params = random_params(family, cfg)
    out = made(family, cfg)(params, PROMPTS, NEW, sampling)
    assert out == recomputed(family, cfg, params, PROMPTS, NEW, sampling)


def test_texts_do_not_know_of_each_other():
    family, cfg = FAMILIES["mixtral"]
    params, generate = random_params(family, cfg), made(family, cfg)
    seeds = [7, 8, 9]
    together = generate(params, PROMPTS, NEW, Sampling(temperature=1.0, seed=seeds))
    for prompt, seed, text in zip(PROMPTS, seeds, together, strict=True):
        assert generate(params, [prompt], NEW, Sampling(temperature=1.0, seed=[seed])) == [text]


def test_a_text_ends_with_a_stop_token_and_the_others_go_on():
    family, cfg = FAMILIES["qwen3"]
    params, generate = random_params(family, cfg), made(family, cfg)
    full = generate(params, PROMPTS, NEW, DRAWN)
    stop = {full[0][1], full[2][2]}
    cut = [t[: next((i + 1 for i, x in enumerate(t) if x in stop), NEW)] for t in full]
    assert len({len(t) for t in cut}) > 1
    assert generate(params, PROMPTS, NEW, DRAWN, stop=stop) == cut
    assert generate(params, PROMPTS, NEW, DRAWN, stop={t[0] for t in full}) == [t[:1] for t in full]


def test_the_same_seed_gives_the_same_text():
    family, cfg = FAMILIES["llama"]
    params, generate = random_params(family, cfg), made(family, cfg)
    texts = [generate(params, PROMPTS, NEW, Sampling(temperature=2.0, seed=s)) for s in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]


def test_the_last_place_of_the_cache_is_used():
    family, cfg = FAMILIES["gpt2"]
    params, generate = random_params(family, cfg), made(family, cfg, length=5)
    prompts = [[1, 2, 3, 4, 5], [6]]
    assert generate(params, prompts, 1) == recomputed(family, cfg, params, prompts, 1)
    assert generate(params, [[1, 2]], 4) == recomputed(family, cfg, params, [[1, 2]], 4)
    assert generate(params, prompts, 0) == [[], []]
    assert generate(params, [], 3) == []


LAYOUTS = {
    "one rank": (ff.Mesh(), layouts.single()),
    "tp": (ff.Mesh(tp=2), layouts.tp("tp")),
    "fsdp | tp_sp": (ff.Mesh(dp=2, tp=2), layouts.fsdp("dp") | layouts.tp_sp("tp")),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "deepseek v3"])
def test_layouts_write_the_same_text(name, layout):
    family, cfg = FAMILIES[name]
    mesh, table = LAYOUTS[layout]
    params = random_params(family, cfg)
    # Four texts, which an axis of two divides; one of them is not used.
    generate = made(family, cfg, texts=4, prompt=5, mesh=mesh, layout=table)
    for sampling in (Sampling(), DRAWN):
        plain = made(family, cfg)(params, PROMPTS, NEW, sampling)
        assert generate.simulate(params, PROMPTS, NEW, sampling) == plain
    assert generate.run_whole(params, PROMPTS, NEW, DRAWN) == plain
    if mesh.size == 1:
        assert generate(params, PROMPTS, NEW, DRAWN) == plain


def test_a_decoding_step_sends_no_more_than_its_layout_promises():
    family, cfg = FAMILIES["llama"]
    generate = made(family, cfg, texts=2, mesh=ff.Mesh(tp=2), layout=layouts.tp("tp"))
    sent = [(c.name, c.axes) for c in generate.decode.collectives()]
    # One sum for the embedding, two a layer; the logits are gathered, so that every rank chooses alike.
    assert sorted(sent) == [("all_gather", ("tp",)), *[("psum", ("tp",))] * (1 + 2 * cfg.layers)]
    kept = {str(t) for t in (x["k"] for x in generate.decode.out_types[1])}
    assert kept == {"f64[2, 2@tp, 9, 4]"}


def test_two_real_ranks_write_what_one_device_does(tmp_path):
    ended = launch("generated", 2, tmp_path, limit_s=120)
    assert [e.code for e in ended] == [0, 0], "\n".join(e.text for e in ended)
    reports = [json.loads((tmp_path / f"rank{r}.json").read_text()) for r in range(2)]
    params = ff.init(generator().template, 5)
    assert reports[0] == reports[1] == {"texts": written(generator(), params), "same": True}


def test_half_precision_is_kept_and_computed_in():
    cfg = llama.LlamaConfig(vocab=13, layers=2, embed=8, heads=4, kv_heads=2, mlp=6, init_std=0.4)
    layout = layouts.tp("tp") | layouts.mixed()
    template, params = llama.template(cfg), ff.init(llama.template(cfg))
    for dtype in (torch.bfloat16, torch.float32):
        cache = llama.cache_template(cfg, 3, 9, dtype)
        split = {"mesh": ff.Mesh(tp=2), "layout": layout, "device": "cpu"}
        generate = Generator(ft.partial(llama.extend, cfg), template=template, cache=cache, **split)
        assert {x["k"].dtype for x in generate.decode.out_types[1]} == {dtype}
        assert generate.decode.out_types[0].dtype == torch.bfloat16
        assert [len(t) for t in generate.simulate(params, PROMPTS, NEW)] == [NEW] * 3


def refused(call, *args, **kwargs):
    with pytest.raises(GenerateError) as error:
        call(*args, **kwargs)
    text = str(error.value)
    assert all(part in text for part in ("got:", "problem:", "rule:", "fix:")), text
    return text


def test_prompts_without_room_or_tokens_are_listed_at_once():
    family, cfg = FAMILIES["llama"]
    generate = made(family, cfg, prompt=6)
    text = refused(generate, {}, [[], [1] * 7, [1, 2, 13, -1]], 4)
    assert text.startswith("3 problems:")
    for word in ("prompts[0]", "an empty prompt", "prompts[1]", "7 tokens for 6 places", "prompts[2]", "[13, -1]"):
        assert word in text
    assert "0 .. 12" in text
    text = refused(generate, {}, [[1] * 6], 5)
    assert "10 tokens are kept, the cache has 9 places" in text and "length=10" in text
    assert "4 is more than the 3 texts" in refused(generate, {}, [[1]] * 4, 1)
    assert "2 seeds for 1 prompts" in refused(generate, {}, [[1]], 1, Sampling(seed=[1, 2]))
    assert "new=-1" in refused(generate, {}, [[1]], -1)
    assert "stop=" in refused(generate, {}, [[1]], 1, stop=[99])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt": 10}, ["prompt=10", "not in 1 .. 9"]),
        ({"prompt": 0}, ["prompt=0", "not in 1 .. 9"]),
        ({"mesh": ff.Mesh(tp=2)}, ["no layout"]),
        ({"layout": layouts.tp("tp")}, ["no mesh"]),
    ],
)
def test_a_generator_of_settings_that_do_not_fit_is_refused(change, words):
    text = refused(made, *FAMILIES["llama"], **change)
    assert all(word in text for word in words), text


def test_a_cache_of_several_sizes_is_refused():
    family, cfg = FAMILIES["llama"]
    cache = [family.cache_template(cfg, 2, n)[0] for n in (4, 5)]
    text = refused(Generator, family.extend, template=family.template(cfg), cache=cache)
    assert "2 different sizes" in text


def test_a_cache_longer_than_the_model_can_use_is_refused_when_it_is_compiled():
    cfg = gpt2.GPT2Config(vocab=13, context=8, layers=1, embed=8, heads=2)
    with pytest.raises(ff.FeatherError, match=r"1 \.\. 8 make sense"):
        made(gpt2, cfg, mesh=ff.Mesh(tp=2), layout=layouts.tp("tp"))


def test_a_model_with_limited_experts_drops_nothing_when_it_writes():
    cfg = mixtral.MixtralConfig(
        vocab=13, layers=1, embed=8, heads=2, kv_heads=2, expert_mlp=6, experts=4, capacity_factor=0.1,
        dtype=torch.float64, init_std=0.4,
    )  # fmt: skip
    free = dataclasses.replace(cfg, capacity_factor=None)
    params = random_params(mixtral, cfg)
    assert made(mixtral, cfg)(params, PROMPTS, NEW) == made(mixtral, free)(params, PROMPTS, NEW)
