"""Damaged and hostile folders: each is a message in five parts, never another exception, a hang, or wrong weights."""

import json
import os
import socket

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

import fx_feather as ff
from fx_feather import hf, tree
from fx_feather.errors import FeatherError
from fx_feather.hf.file import entries
from fx_feather.models.gpt2 import GPT2Config
from fx_feather.models.llama import LlamaConfig

TINY = LlamaConfig(vocab=7, layers=1, embed=4, heads=2, kv_heads=1, mlp=4)
TIED = LlamaConfig(**{**vars(TINY), "tied": True})
FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
NORM = "model.norm.weight"


def saved(folder, config=TINY, **options):
    model = hf.Model(config)
    params = ff.init(model.template)
    hf.save(folder, model, params, **options)
    return params


def refused(folder, words, do=None, **options):
    with pytest.raises(FeatherError) as error:
        (do or hf.load)(folder, **options)
    for word in [*words, "got:", "problem:", "rule:", "fix:"]:
        assert word in str(error.value), f"{word!r} is not in\n{error.value}"


def same(one, two):
    return all(torch.equal(a, b) for a, b in zip(tree.leaves(one), tree.leaves(two), strict=True))


def split(path):
    raw = path.read_bytes()
    n = int.from_bytes(raw[:8], "little")
    return raw[8 : 8 + n], raw[8 + n :]


def join(path, text, data):
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def entry(**change):
    def edit(folder):
        text, data = split(folder / FILE)
        header = json.loads(text)
        header[NORM] |= change
        join(folder / FILE, json.dumps({k: v for k, v in header.items() if v is not None}).encode(), data)

    return edit


def header(change):
    def edit(folder):
        text, data = split(folder / FILE)
        join(folder / FILE, change(text), data)

    return edit


def without(key):
    def change(text):
        value = json.loads(text)
        del value[NORM][key]
        return json.dumps(value).encode()

    return header(change)


def replaced(value):
    return header(lambda text: json.dumps(json.loads(text) | {NORM: value}).encode())


def raw(data):
    return lambda folder: (folder / FILE).write_bytes(data)


def tensors(change):
    def edit(folder):
        found = load_file(folder / FILE)
        change(found)
        save_file(found, folder / FILE)

    return edit


def last(text, twice):
    return text.rstrip()[:-1] + twice + b"}"


HEADERS = {
    "a negative start": (entry(data_offsets=[-16, 0]), ["no start and end"]),
    "an end before the start": (entry(data_offsets=[16, 0]), ["no start and end"]),
    "overlapping tensors": (entry(data_offsets=[0, 16]), ["overlaps"]),
    "three offsets": (entry(data_offsets=[0, 16, 32]), ["no start and end"]),
    "offsets that are text": (entry(data_offsets=["0", "16"]), ["no start and end"]),
    "offsets that are fractions": (entry(data_offsets=[0.0, 16.0]), ["no start and end"]),
    "huge offsets": (entry(data_offsets=[0, 1 << 70]), ["no start and end"]),
    "offsets beyond the file": (entry(data_offsets=[1 << 40, (1 << 40) + 16]), ["truncated"]),
    "a negative shape": (entry(shape=[-4]), ["no list of sizes"]),
    "two negative sizes": (entry(shape=[-2, -2]), ["no list of sizes"]),
    "a shape that is text": (entry(shape="4"), ["no list of sizes"]),
    "a true size": (entry(shape=[True, 4]), ["no list of sizes"]),
    "another shape": (entry(shape=[5]), ["16 bytes, 20 for its shape"]),
    "a shape of the same size": (entry(shape=[2, 2]), ["of another shape", NORM]),
    "a dtype that is not known": (entry(dtype="F4"), ["dtype F4"]),
    "a dtype that is a list": (entry(dtype=["F32"]), ["dtype ['F32']"]),
    "a dtype of the same size": (entry(dtype="I32"), ["quantised or no floating numbers", "int32"]),
    "no dtype": (without("dtype"), ["has no dtype, shape and data_offsets"]),
    "no shape": (without("shape"), ["has no dtype, shape and data_offsets"]),
    "no offsets": (without("data_offsets"), ["has no dtype, shape and data_offsets"]),
    "an entry that is text": (replaced("x"), ["has no dtype, shape and data_offsets"]),
    "an entry that is null": (replaced(None), ["has no dtype, shape and data_offsets"]),
    "a header that is a list": (header(lambda t: b"[]"), ["no JSON object"]),
    "a header that is no JSON": (header(lambda t: b"{'"), ["not JSON"]),
    "a header that is no text": (header(lambda t: b"{\xff\xfe}"), ["not JSON"]),
    "a header that is a number": (header(lambda t: b"7"), ["no JSON object"]),
    "a shape of fractions": (entry(shape=[4.0]), ["no list of sizes"]),
    "a header of zeros": (header(lambda t: bytes(64)), ["not JSON"]),
    "a header with NaN": (header(lambda t: last(t, b',"x":NaN')), ["not JSON"]),
    "a deep header": (header(lambda t: b'{"a":' * 100_000), ["not JSON"]),
    "a number of many digits": (header(lambda t: last(t, b',"x":' + b"9" * 5000)), ["not JSON"]),
    "a tensor twice": (
        header(lambda t: last(t, b',"model.norm.weight":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}')),
        ["'model.norm.weight' is there twice"],
    ),
    "a key twice": (
        header(lambda t: t.replace(b'"dtype":"F32"', b'"dtype":"F32","dtype":"F32"', 1)),
        ["'dtype' is there twice"],
    ),
    "metadata that are no text": (
        header(lambda t: t.replace(b'{"format":"pt"}', b'{"format":7}')),
        ["the safetensors library refuses it"],
    ),
    "bytes at the end": (
        lambda f: (f / FILE).write_bytes((f / FILE).read_bytes() + bytes(8)),
        ["8 bytes follow after"],
    ),
    "a file cut short": (lambda f: os.truncate(f / FILE, (f / FILE).stat().st_size - 8), ["truncated"]),
    "an empty file": (raw(b""), ["truncated, or no safetensors"]),
    "seven bytes": (raw(b"1234567"), ["truncated, or no safetensors"]),
    "a header longer than the file": (raw((1 << 62).to_bytes(8, "little") + b"{}"), ["does not fit"]),
    "a git-lfs pointer": (raw(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"), ["git lfs pull"]),
    "a pickle": (raw(b"PK\x03\x04" + bytes(100)), ["no safetensors"]),
    "fp8 tensors": (
        tensors(lambda t: t.update({NORM: t[NORM].to(torch.float8_e4m3fn)})),
        ["quantised or no floating numbers", "float8_e4m3fn", "dequantised"],
    ),
    "int8 tensors": (tensors(lambda t: t.update({NORM: t[NORM].to(torch.int8)})), ["quantised", "int8"]),
}


@pytest.mark.parametrize("name", HEADERS)
def test_weights(name, tmp_path):
    saved(tmp_path)
    edit, words = HEADERS[name]
    edit(tmp_path)
    refused(tmp_path, words)


def fifo(folder):
    (folder / FILE).unlink()
    os.mkfifo(folder / FILE)


def listening(folder):
    (folder / FILE).unlink()
    with socket.socket(socket.AF_UNIX) as s:
        here = os.getcwd()
        os.chdir(folder)
        s.bind(FILE)
        os.chdir(here)


def linked(target):
    def edit(folder):
        (folder / FILE).unlink()
        (folder / FILE).symlink_to(target)

    return edit


def pickled(folder):
    (folder / FILE).rename(folder / "pytorch_model.bin")


def config_fifo(folder):
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")


PLACES = {
    "a FIFO": (fifo, ["it is a FIFO"]),
    "a FIFO as config": (config_fifo, ["it is a FIFO"]),
    "a socket": (listening, ["it is a socket"]),
    "a device": (linked("/dev/zero"), ["it is a device"]),
    "a folder": (lambda f: (f / FILE).unlink() or (f / FILE).mkdir(), ["it is a folder"]),
    "a link to nothing": (linked("nothing"), ["it is a link to nothing"]),
    "a link in a circle": (linked(FILE), ["it can't be read"]),
    "pickles only": (pickled, ["it is missing", "pickled weights only"]),
    "an adapter": (lambda f: (f / "adapter_config.json").write_text("{}"), ["adapter_config.json", "LoRA", "merge"]),
    "two models": (
        lambda f: (f / INDEX).write_text('{"weight_map": {"model.norm.weight": "a.safetensors"}}'),
        ["model.safetensors is there too"],
    ),
}


@pytest.mark.parametrize("name", PLACES)
def test_files_that_are_none(name, tmp_path):
    saved(tmp_path)
    edit, words = PLACES[name]
    edit(tmp_path)
    refused(tmp_path, words)


INDEXES = {
    "a path out": ({"weight_map": {"a": "../a.safetensors", "b": "/etc/passwd"}}, ["'../a.saf", "'/etc/pa"]),
    "no name": ({"weight_map": {"a": ""}}, ["no name of a file"]),
    "the folder itself": ({"weight_map": {"a": "."}}, ["no name of a file"]),
    "a zero byte": ({"weight_map": {"a": "a\0b"}}, ["no name of a file"]),
    "a long name": ({"weight_map": {"a": "a" * 5000}}, ["no name of a file"]),
    "a number": ({"weight_map": {"a": 7}}, ["no name of a file"]),
    "a list": ({"weight_map": ["a"]}, ["no object"]),
    "none": ({}, ["no object"]),
    "empty": ({"weight_map": {}}, ["no object"]),
    "no object": ([], ["it is a JSON list"]),
    "a tensor that its file lacks": ({"weight_map": {"nothing": "a.safetensors"}}, ["'nothing' is not in it"]),
    "a file that is not there": ({"weight_map": {NORM: "b.safetensors"}}, ["b.safetensors", "it is missing"]),
}  # fmt: skip


@pytest.mark.parametrize("name", INDEXES)
def test_indexes(name, tmp_path):
    saved(tmp_path)
    (tmp_path / FILE).rename(tmp_path / "a.safetensors")
    value, words = INDEXES[name]
    (tmp_path / INDEX).write_text(json.dumps(value))
    refused(tmp_path, words)


def test_a_tensor_in_two_files(tmp_path):
    saved(tmp_path, shard_bytes=100)
    one, two = sorted(tmp_path.glob("*.safetensors"))[:2]
    found = load_file(two) | load_file(one)
    save_file(found, two)
    refused(tmp_path, ["1 tensors are in", one.name])


MANY = 10**6
CONFIGS = {
    "a million layers": ({"num_hidden_layers": MANY}, ["a config of 1000000 layers"]),
    "layers beyond counting": ({"num_hidden_layers": 10**30}, [f"a config of {10**30} layers"]),
    "two layers": ({"num_hidden_layers": 2}, ["9 missing"]),
    "heads beyond counting": ({"num_attention_heads": 10**14, "num_key_value_heads": 3 * 10**12 + 1}, ["heads"]),
    "no heads": ({"num_attention_heads": 0}, ["heads"]),
    "negative layers": ({"num_hidden_layers": -1}, ["layers"]),
    "layers as text": ({"num_hidden_layers": "1"}, ["layers"]),
    "layers as a list": ({"num_hidden_layers": [1]}, ["layers"]),
    "tied as text": ({"tie_word_embeddings": "false"}, ["neither true nor false"]),
    "a family that is a list": ({"model_type": ["llama"]}, ["none of the 7 architectures"]),
    "rope as text": ({"rope_parameters": "x"}, ["it is a str, not an object"]),
    "theta as text": ({"rope_parameters": {"rope_theta": "x"}}, ["rope_theta='x'"]),
    "theta that is no number": ({"rope_parameters": {"rope_theta": float("nan")}}, ["rope_theta=nan"]),
    "scaling without a length": (
        {"rope_scaling": {"type": "yarn"}, "max_position_embeddings": None},
        ["'original_max_position_embeddings' is missing"],
    ),
    "a kind that is a list": ({"rope_scaling": {"type": ["yarn"]}}, ["rope_parameters"]),
    "eps as text": ({"rms_norm_eps": "1e-6"}, ["norm_eps"]),
    "sliding layers": ({"layer_types": ["sliding_attention"]}, ["layer_types"]),
    "a dtype that is a list": ({"dtype": [], "torch_dtype": {"a": 1}}, ["no dtype"]),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configs(name, tmp_path):
    saved(tmp_path)
    change, words = CONFIGS[name]
    config = json.loads((tmp_path / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused(tmp_path, words)


@pytest.mark.parametrize("text", ["", "[]", "7", "{", '{"a":' * 100_000, "\0", "9" * 5000])
def test_configs_that_are_none(text, tmp_path):
    saved(tmp_path)
    (tmp_path / "config.json").write_text(text)
    refused(tmp_path, ["config.json can't be read"])


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("meta-llama/Llama-3.2-1B", ["a name of the hub", "hf download meta-llama/Llama-3.2-1B"]),
        ("gpt2-which-is-nowhere", ["a name of the hub"]),
        ("~/models/mine", ["'~' is not a folder", os.path.expanduser("~/models/mine")]),
        ("/nowhere/at/all", ["there is no such folder"]),
        (__file__, ["it is a file", os.path.dirname(__file__)]),
        ("", ["it is no path"]),
        ("a\0b", ["it is no path"]),
        (None, ["it is no path"]),
        (3, ["it is no path"]),
    ],
)
def test_paths_that_are_no_folder(path, words):
    refused(path, words)


def test_saving_to_what_is_no_folder_of_a_model(tmp_path):
    model = hf.Model(TINY)
    params = ff.init(model.template)
    (tmp_path / "adapter_config.json").write_text("{}")
    for path, words in ((tmp_path, ["LoRA"]), (__file__, ["it is a file"]), ("~/x", ["'~' is not a folder"])):
        refused(path, words, lambda p: hf.save(p, model, params))
    refused(tmp_path, ["no dtype of parameters"], lambda p: hf.load(tmp_path.parent, dtype=torch.int8))


# What transformers reads, is read here as it reads it.


def logits(folder):
    theirs = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.arange(7)[None]
    with torch.no_grad():
        return theirs(input_ids=tokens).logits


def agrees(folder):
    model, params = hf.load(folder)
    torch.testing.assert_close(model.apply(params, torch.arange(7)[None]), logits(folder), rtol=1e-5, atol=1e-6)
    return model, params


def test_another_head_unties_a_tied_config(tmp_path):
    saved(tmp_path, TIED)
    tensors(lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))(tmp_path)
    assert agrees(tmp_path)[0].config.tied
    tensors(lambda t: t.update({"lm_head.weight": t["lm_head.weight"] + 1}))(tmp_path)
    model, params = agrees(tmp_path)
    assert not model.config.tied
    hf.save(tmp_path / "again", model, params)
    assert json.loads((tmp_path / "again" / "config.json").read_text())["tie_word_embeddings"] is False
    assert torch.equal(logits(tmp_path / "again"), logits(tmp_path))


def test_a_head_that_can_only_be_tied_is_refused_where_it_differs(tmp_path):
    saved(tmp_path, GPT2Config(vocab=7, context=8, layers=1, embed=4, heads=2))
    tensors(lambda t: t.update({"lm_head.weight": t["transformer.wte.weight"] + 1}))(tmp_path)
    refused(tmp_path, ["lm_head.weight differs from transformer.wte.weight"])


def test_an_index_that_names_a_tied_head_which_no_file_has(tmp_path):
    params = saved(tmp_path, TIED, shard_bytes=300)
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = "model-00001-of-00002.safetensors"
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    assert same(agrees(tmp_path)[1], params)


@pytest.mark.parametrize("config", [TINY, TIED])
def test_names_without_a_prefix_beside_a_head(config, tmp_path):
    params = saved(tmp_path, config)
    found = {n.removeprefix("model."): x for n, x in load_file(tmp_path / FILE).items()}
    if config.tied:
        found["lm_head.weight"] = found["embed_tokens.weight"].clone()
    save_file(found, tmp_path / FILE, {"format": "pt"})
    assert same(agrees(tmp_path)[1], params)


def test_swish_is_silu(tmp_path):
    params = saved(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"hidden_act": "swish"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert same(agrees(tmp_path)[1], params)


# Any bytes: what is read is what the safetensors library reads, or a message.


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzzed")
    saved(folder)
    return folder, (folder / FILE).read_bytes(), (folder / "config.json").read_bytes()


def mutated(data, draw, at_most):
    data = bytearray(data)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, at_most - 1))
        kind = draw(st.sampled_from(["byte", "text", "drop", "twice"]))
        if kind == "byte":
            data[at] = draw(st.integers(0, 255))
        elif kind == "text":
            word = draw(st.sampled_from([*b'0123456789-[]{},:"', b"null", b"1e9", b"-1", b"true"]))
            word = bytes([word]) if isinstance(word, int) else word
            data[at : at + len(word)] = word
        elif kind == "drop":
            del data[at : at + draw(st.integers(1, 20))]
        else:
            data[at:at] = data[at : at + draw(st.integers(1, 40))]
    return bytes(data)


@given(data=st.data())
def test_any_change_of_a_file_is_read_as_the_library_reads_it_or_refused(fuzzed, data):
    folder, whole, config = fuzzed
    length = 8 + int.from_bytes(whole[:8], "little")
    changed = mutated(whole, data.draw, length)
    if data.draw(st.booleans()):
        # The header's length is right again.
        changed = (len(changed) - len(whole) + length - 8).to_bytes(8, "little", signed=True) + changed[8:]
    (folder / FILE).write_bytes(changed)
    (folder / "config.json").write_bytes(config)
    try:
        expected = load_file(folder / FILE)
    except (SafetensorError, KeyError, ValueError, TypeError):
        expected = None
    found, wrong = entries(folder / FILE)
    assert wrong or expected is not None
    if not wrong:
        assert found.keys() == expected.keys()
        for name, e in found.items():
            x = e.read([slice(None)] * len(e.shape))
            assert x.dtype == expected[name].dtype and x.shape == expected[name].shape
            assert x.view(-1).view(torch.uint8).equal(expected[name].view(-1).view(torch.uint8)), name
    try:
        _, params = hf.load(folder)
    except FeatherError:
        return
    assert not wrong and torch.equal(params["norm"], expected[NORM])


@given(data=st.data())
def test_any_change_of_a_config_is_read_or_refused(fuzzed, data):
    folder, whole, config = fuzzed
    (folder / FILE).write_bytes(whole)
    if data.draw(st.booleans()):
        changed = mutated(config, data.draw, len(config))
    else:
        value = json.loads(config)
        key = data.draw(st.sampled_from(sorted(value)))
        odd = st.one_of(st.none(), st.booleans(), st.integers(-(10**20), 10**20), st.floats(), st.text(max_size=3))
        value[key] = data.draw(
            st.recursive(odd, lambda s: st.lists(s, max_size=2) | st.dictionaries(st.text(), s, max_size=2))
        )
        changed = json.dumps(value).encode()
    (folder / "config.json").write_bytes(changed)
    try:
        model, params = hf.load(folder)
    except FeatherError:
        return
    assert torch.equal(params["norm"], load_file(folder / FILE)[NORM])
    assert tree.structure(model.template) == tree.structure(params)
