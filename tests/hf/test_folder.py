"""Folders: in one file or several, any dtype, local parts of a layout, and messages that list all that is wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig as TheirConfig
from transformers import LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import fx_feather as ff
import layouts
from fx_feather import hf, tree
from fx_feather.errors import FeatherError, LayoutError, ShapeError
from fx_feather.hf.file import Entry
from fx_feather.models.deepseek_v3 import DeepSeekV3Config
from fx_feather.models.gpt2 import GPT2Config
from fx_feather.models.llama import LlamaConfig
from fx_feather.models.mixtral import MixtralConfig as OurMixtralConfig
from fx_feather.spec import assemble
from tests.models.reference import random_model

TINY = LlamaConfig(vocab=19, layers=2, embed=8, heads=4, kv_heads=2, mlp=12)
MESH = ff.Mesh(dp=2, tp=2)
LAYOUT = layouts.fsdp("dp") | layouts.tp_sp("tp")


def made(config=TINY, seed=0):
    model = hf.Model(config)
    params = tree.map(lambda x: x + 0.1 * torch.randn(x.shape).to(x.dtype), ff.init(model.template, seed))
    return model, params


def same(one, two):
    assert tree.structure(one) == tree.structure(two)
    return all(
        torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(tree.leaves(one), tree.leaves(two), strict=True)
    )


def bits(folder):
    return {n: x for f in sorted(Path(folder).glob("*.safetensors")) for n, x in load_file(f).items()}


CONFIGS = {
    "llama": TINY,
    "gpt2": GPT2Config(vocab=19, context=8, layers=2, embed=8, heads=4),
    "mixtral": OurMixtralConfig(vocab=19, layers=2, embed=8, heads=4, kv_heads=2, expert_mlp=6, experts=4),
    "deepseek v3": DeepSeekV3Config(
        vocab=19, layers=2, dense_layers=1, embed=8, heads=4, q_rank=6, kv_rank=4, plain_dim=4, rope_dim=2, value_dim=4,
        mlp=12, expert_mlp=4, experts=8, shared_experts=1, top_k=2, groups=4, top_groups=2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_every_rank_reads_its_own_part_and_all_write_the_same_files(name, tmp_path):
    model, params = made(CONFIGS[name])
    hf.save(tmp_path / "whole", model, params, shard_bytes=3000)
    parts = [hf.load(tmp_path / "whole", MESH, LAYOUT, rank=r)[1] for r in range(4)]
    paths, template = tree.paths(params), tree.leaves(model.template)
    for i, (path, p, want) in enumerate(zip(paths, template, tree.leaves(params), strict=True)):
        t = LAYOUT.param_types(p.dim_names, p.shape, p.dtype, path).store
        assert torch.equal(assemble([tree.leaves(x)[i] for x in parts], t, MESH), want), path
    hf.save(tmp_path / "parts", model, parts, mesh=MESH, layout=LAYOUT, shard_bytes=3000)
    one, two = ({f.name: f.read_bytes() for f in (tmp_path / d).iterdir()} for d in ("whole", "parts"))
    assert one == two and len(one) >= 4


def test_a_loaded_model_computes_the_same_in_four_parts(tmp_path):
    theirs = random_model(
        MixtralForCausalLM,
        MixtralConfig(
            vocab_size=19, hidden_size=8, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            intermediate_size=6, num_local_experts=4,
        ),
    )  # fmt: skip
    theirs.save_pretrained(tmp_path, max_shard_size=2000)
    model, params = hf.load(tmp_path)
    tokens = torch.randint(0, 19, (4, 6))
    f = ff.compile(lambda p, b: model.apply(p, b), template=model.template, mesh=MESH, layout=LAYOUT, batch=tokens)
    with torch.no_grad():
        torch.testing.assert_close(f.simulate(params, tokens), theirs(input_ids=tokens).logits, rtol=0, atol=2e-4)


@pytest.mark.parametrize("size", ["2KB", "100KB"])
def test_what_transformers_shards_is_read(size, tmp_path):
    config = TheirConfig(
        vocab_size=19, hidden_size=8, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=12,
    )  # fmt: skip
    theirs = random_model(LlamaForCausalLM, config)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size=size)
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists() == (size == "2KB")
    model, params = hf.load(tmp_path / "theirs")
    hf.save(tmp_path / "ours", model, params, shard_bytes=2000)
    assert (tmp_path / "ours" / "model.safetensors.index.json").exists()
    one, two = bits(tmp_path / "theirs"), bits(tmp_path / "ours")
    assert one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)
    again = LlamaForCausalLM.from_pretrained(tmp_path / "ours")
    for name, x in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[name], x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_every_float_dtype_is_kept_or_cast(dtype, tmp_path):
    model, params = made(LlamaConfig(**{**vars(TINY), "dtype": dtype}))
    hf.save(tmp_path, model, params)
    again, loaded = hf.load(tmp_path)
    assert again.config == model.config and same(loaded, params)
    cast, wide = hf.load(tmp_path, dtype=torch.float64)
    assert same(wide, tree.map(torch.Tensor.double, params))
    assert {p.dtype for p in tree.leaves(cast.template)} == {torch.float64}


def test_dtypes_may_be_mixed(tmp_path):
    model, params = made(CONFIGS["deepseek v3"])
    hf.save(tmp_path, model, params)
    tensors = {n: x if "bias" in n else x.bfloat16() for n, x in load_file(tmp_path / "model.safetensors").items()}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    again, loaded = hf.load(tmp_path)
    assert loaded["layers"][1]["moe"]["router"]["bias"].dtype == torch.float32
    assert again.template["embed"].dtype == loaded["embed"].dtype == torch.bfloat16
    hf.save(tmp_path / "again", again, loaded)
    one, two = bits(tmp_path), bits(tmp_path / "again")
    assert all(torch.equal(one[n], two[n]) and one[n].dtype == two[n].dtype for n in one)


def test_what_is_no_parameter_is_left_out(tmp_path):
    model, params = made()
    hf.save(tmp_path, model, params)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    save_file(tensors, tmp_path / "model.safetensors")
    assert same(hf.load(tmp_path)[1], params)
    # Files of a model without its head have names without the prefix.
    model, params = made(CONFIGS["gpt2"])
    hf.save(tmp_path, model, params)
    tensors = {n.removeprefix("transformer."): x for n, x in load_file(tmp_path / "model.safetensors").items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 8, 8)
    save_file(tensors, tmp_path / "model.safetensors")
    assert same(hf.load(tmp_path)[1], params)


def test_settings_without_a_word_here_are_kept(tmp_path):
    model, params = made()
    hf.save(tmp_path, model, params)
    config = json.loads((tmp_path / "config.json").read_text()) | {"eos_token_id": 7, "max_position_embeddings": 77}
    (tmp_path / "config.json").write_text(json.dumps(config))
    hf.save(tmp_path / "again", *hf.load(tmp_path))
    again = json.loads((tmp_path / "again" / "config.json").read_text())
    assert again["eos_token_id"] == 7 and again["max_position_embeddings"] == 77


def refused(folder, words, **options):
    with pytest.raises(FeatherError) as error:
        hf.load(folder, **options)
    for word in [*words, "got:", "problem:", "rule:", "fix:"]:
        assert word in str(error.value), f"{word!r} is not in\n{error.value}"


def test_all_tensors_that_do_not_fit_are_listed_at_once(tmp_path):
    model, params = made()
    hf.save(tmp_path, model, params)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.1.self_attn.q_proj.bias"] = torch.zeros(8)
    tensors["lm_head.weight"] = torch.zeros(18, 8)
    save_file(tensors, tmp_path / "model.safetensors")
    refused(
        tmp_path,
        [
            "2 missing:",
            "model.norm.weight",
            "model.layers.1.mlp.up_proj.weight",
            "1 in the files, but not in the model: model.layers.1.self_attn.q_proj.bias",
            "1 of another shape: lm_head.weight: [18, 8] in the file, [19, 8] by the config",
        ],
    )


def test_damaged_files_are_listed_at_once(tmp_path):
    model, params = made()
    hf.save(tmp_path, model, params, shard_bytes=1000)
    files = sorted(tmp_path.glob("*.safetensors"))
    files[0].unlink()
    os.truncate(files[1], files[1].stat().st_size - 4)
    files[2].write_bytes(b"no safetensors at all")
    files[3].write_bytes(files[3].read_bytes()[:5])
    refused(
        tmp_path, ["4 problems:", files[0].name, "it is missing", "the file is truncated", files[2].name, files[3].name]
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "mamba"}, ["'mamba' is none of", "one of llama, qwen3, gpt2"]),
        ({"hidden_act": "gelu", "attention_bias": True}, ["2 problems:", "'gelu' is not 'silu'", "attention_bias"]),
        ({"rope_scaling": {"rope_type": "longrope"}}, ["rope of kind 'longrope'", "llama3"]),
        ({"rope_scaling": {"type": "linear"}}, ["'factor' is missing"]),
        (
            {"hidden_size": None, "vocab_size": None},
            ["2 problems:", "'hidden_size' is null", "'vocab_size' is null"],
        ),
        ({"dtype": "int4"}, ["'int4' is no dtype"]),
    ],
)
def test_settings_that_are_not_here_are_refused(change, words, tmp_path):
    model, params = made()
    hf.save(tmp_path, model, params)
    config = json.loads((tmp_path / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused(tmp_path, words)


def test_other_mistakes(tmp_path):
    refused(tmp_path, ["config.json can't be read"])
    model, params = made()
    hf.save(tmp_path, model, params)
    refused(tmp_path, ["layout=None", "both, or neither"], mesh=MESH)
    with pytest.raises(FeatherError, match=r"\[18, 8\] is not \[19, 8\]"):
        hf.save(tmp_path, model, params | {"embed": params["embed"][1:]})
    with pytest.raises(FeatherError, match="config of type int"):
        hf.Model(3)


def test_a_tensor_is_read_in_chunks_of_rows(tmp_path, monkeypatch):
    monkeypatch.setattr("fx_feather.hf.file.CHUNK", 100)
    x = torch.arange(50 * 7, dtype=torch.int32).view(50, 7)
    (tmp_path / "x").write_bytes(b"abc" + x.numpy().tobytes())
    entry = Entry(tmp_path / "x", torch.int32, (50, 7), 3)
    for rows, columns in ((slice(None), slice(None)), (slice(3, 41), slice(2, 5)), (slice(4, 4), slice(None))):
        assert torch.equal(entry.read((rows, columns)), x[rows, columns])


LARGE = """
import os, re, sys
import fx_feather as ff, layouts
from fx_feather import hf, tree
def now():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
before = now()
_, params = hf.load(sys.argv[1], ff.Mesh(dp=2, tp=2), layouts.fsdp("dp") | layouts.tp("tp"), rank=3)
peak = int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
print(peak - before, sum(x.nbytes for x in tree.leaves(params)))
"""


def test_no_rank_holds_more_than_its_share(tmp_path):
    config = LlamaConfig(
        vocab=1024, layers=16, embed=2048, heads=16, kv_heads=4, mlp=1024, dtype=torch.bfloat16
    )  # fmt: skip
    model = hf.Model(config)
    params = tree.map(lambda p: torch.zeros(p.shape, dtype=p.dtype), model.template)
    total = sum(p.numel * p.dtype.itemsize for p in tree.leaves(model.template))
    hf.save(tmp_path, model, params, shard_bytes=total // 8 + (8 << 20))
    del params
    assert len(list(tmp_path.glob("*.safetensors"))) == 8
    run = [sys.executable, "-c", LARGE, str(tmp_path)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    used, share = map(int, done.stdout.split())
    assert share < 1.01 * total / 4
    assert used < 1.3 * share + (64 << 20), f"{used >> 20} MB for a share of {share >> 20} MB"


def test_more_ranks_than_heads_are_refused_as_compile_refuses_them(tmp_path):
    model, params = made()
    hf.save(tmp_path, model, params)
    refused(tmp_path, ["(heads) has size 4, axis 'tp' has size 8"], mesh=ff.Mesh(tp=8), layout=layouts.tp("tp"), rank=4)


def test_parts_of_one_rank_and_ranks_that_are_not_there(tmp_path):
    model = ff.hf.Model(LlamaConfig(vocab=8, layers=1, embed=8, heads=2, kv_heads=2, mlp=8))
    params, mesh, layout = ff.init(model.template), ff.Mesh(fsdp=2), layouts.fsdp("fsdp")
    for wrong, word in ((params, "a dict"), ([params], "1 of them"), ([], "a list")):
        with pytest.raises(ShapeError, match=word) as e:
            ff.hf.save(tmp_path / "model", model, wrong, mesh=mesh, layout=layout)
        assert "step.whole(state).params" in str(e.value)
    ff.hf.save(tmp_path / "model", model, params)
    for rank in (2, -1, "0"):
        with pytest.raises(LayoutError, match="the ranks 0 to 1"):
            ff.hf.load(tmp_path / "model", mesh, layout, rank=rank)


def test_a_folder_of_nearly_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_model").mkdir()
    with pytest.raises(ShapeError, match=r"ff\.hf\.load\('my_model'\), which is there"):
        ff.hf.load("mymodel")
