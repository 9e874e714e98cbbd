"""Folders that are damaged, hostile or of another kind: a message in five parts, and never a wrong weight."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import fx_feather as ff
from fx_feather import hf, tree
from fx_feather.errors import FeatherError
from fx_feather.models.llama import LlamaConfig

CONFIG = LlamaConfig(vocab=11, layers=1, embed=4, heads=2, kv_heads=1, mlp=6)
TIED = LlamaConfig(**{**vars(CONFIG), "tied": True})
PARTS = ("got:", "problem:", "rule:", "fix:")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def saved(folder: Path, config: LlamaConfig = CONFIG, **options: Any) -> Any:
    model = hf.Model(config)
    params = ff.init(model.template, 0)
    hf.save(folder, model, params, **options)
    return params


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    n = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + n]), data[8 + n :]


def with_header(folder: Path, change: Callable[[dict[str, Any]], Any], raw: Callable[[str], str] = str) -> None:
    header, data = header_of(folder / SINGLE)
    change(header)
    text = raw(json.dumps(header)).encode()
    (folder / SINGLE).write_bytes(struct.pack("<Q", len(text)) + text + data)


def entry(key: str, value: Any) -> Callable[[Path], None]:
    return lambda f: with_header(f, lambda h: h["model.norm.weight"].__setitem__(key, value))


def without(key: str) -> Callable[[Path], None]:
    return lambda f: with_header(f, lambda h: h["model.norm.weight"].pop(key))


def config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def text(name: str, content: str) -> Callable[[Path], None]:
    return lambda f: (f / name).write_text(content) and None


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        found = load_file(folder / SINGLE)
        change(found)
        save_file(found, folder / SINGLE)

    return edit


def fifo(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return make


def overlap(header: dict[str, Any]) -> None:
    header["model.norm.weight"]["data_offsets"] = header["model.layers.0.input_layernorm.weight"]["data_offsets"]


def directory(folder: Path) -> None:
    (folder / SINGLE).unlink()
    (folder / SINGLE).mkdir()


def twice(folder: Path) -> None:
    with_header(
        folder,
        lambda h: None,
        lambda t: t[:-1] + ', "model.norm.weight": {"dtype":"F32","shape":[4],"data_offsets":[0,16]}}',
    )


def index(weight_map: Any) -> Callable[[Path], None]:
    return text(INDEX, json.dumps({"weight_map": weight_map}))


CASES: dict[str, tuple[Callable[[Path], None], str]] = {
    "negative offsets": (entry("data_offsets", [-16, 0]), "safetensors library refuses"),
    "overlapping entries": (lambda f: with_header(f, overlap), "safetensors library refuses"),
    "offsets out of order": (entry("data_offsets", [16, 0]), "safetensors library refuses"),
    "three offsets": (entry("data_offsets", [0, 8, 16]), "safetensors library refuses"),
    "offsets that are words": (entry("data_offsets", ["0", "16"]), "safetensors library refuses"),
    "no offsets": (without("data_offsets"), "safetensors library refuses"),
    "offsets past the end": (entry("data_offsets", [0, 1 << 40]), "the file is truncated"),
    "a shape of another size": (entry("shape", [5]), "safetensors library refuses"),
    "a negative shape": (entry("shape", [-4]), "safetensors library refuses"),
    "a shape that is a number": (entry("shape", 4), "safetensors library refuses"),
    "a shape of floats": (entry("shape", [4.0]), "safetensors library refuses"),
    "no shape": (without("shape"), "safetensors library refuses"),
    "no dtype": (without("dtype"), "safetensors library refuses"),
    "an unknown dtype": (entry("dtype", "F12"), "safetensors library refuses"),
    "a dtype that is a number": (entry("dtype", 32), "safetensors library refuses"),
    "an entry that is a word": (
        lambda f: with_header(f, lambda h: h.update({"model.norm.weight": "x"})),
        "library refuses",
    ),
    "an entry that is null": (
        lambda f: with_header(f, lambda h: h.update({"model.norm.weight": None})),
        "library refuses",
    ),
    "an entry twice": (twice, "stands there twice"),
    "a header that is a list": (lambda f: with_header(f, lambda h: None, lambda t: "[1, 2]"), "library refuses"),
    "a header that is a number": (lambda f: with_header(f, lambda h: None, lambda t: "7"), "library refuses"),
    "a deep header": (lambda f: with_header(f, lambda h: None, lambda t: "[" * 100_000), "is not JSON"),
    "metadata that is no table": (
        lambda f: with_header(f, lambda h: h.update({"__metadata__": 3})),
        "library refuses",
    ),
    "an empty file": (lambda f: (f / SINGLE).write_bytes(b"") and None, "truncated, or no safetensors"),
    "a huge header": (lambda f: (f / SINGLE).write_bytes(b"\xff" * 64) and None, "truncated, or no safetensors"),
    "bytes after the end": (
        lambda f: (f / SINGLE).write_bytes((f / SINGLE).read_bytes() + b"x" * 16) and None,
        "library refuses",
    ),
    "a file cut short": (
        lambda f: os.truncate(f / SINGLE, (f / SINGLE).stat().st_size - 4),
        "the file is truncated",
    ),
    "a git-lfs pointer": (
        text(SINGLE, "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"),
        "git lfs pull",
    ),
    "weights that are a FIFO": (fifo(SINGLE), "no regular file"),
    "weights that are a folder": (directory, "no regular file"),
    "a config that is a FIFO": (fifo("config.json"), "no regular file"),
    "a config that is a list": (text("config.json", "[]"), "it holds a list"),
    "a config that is no JSON": (text("config.json", "{"), "can't be read"),
    "a deep config": (text("config.json", "[" * 100_000), "can't be read"),
    "a million layers": (config(num_hidden_layers=1_000_000), "layers 1000000"),
    "layers in words": (config(num_hidden_layers="many"), "config.json"),
    "a size that is a list": (config(hidden_size=[4]), "config.json"),
    "a negative size": (config(hidden_size=-4), "config.json"),
    "no heads": (config(num_attention_heads=0), "config.json"),
    "rope that is a word": (config(rope_scaling="linear"), "config.json"),
    "a rope factor in words": (config(rope_scaling={"rope_type": "linear", "factor": "two"}), "config.json"),
    "an index that leaves the folder": (
        index({"model.norm.weight": "../../x.safetensors"}),
        "name no file of the folder",
    ),
    "an absolute index": (index({"model.norm.weight": "/dev/zero"}), "name no file of the folder"),
    "an index of numbers": (index({"model.norm.weight": 3}), "name no file of the folder"),
    "an index without a map": (text(INDEX, "{}"), "name no file of the folder"),
    "an index that is a list": (text(INDEX, "[]"), "it holds a list"),
    "an index of files that are not there": (index({"model.norm.weight": "a.safetensors"}), "it is missing"),
    "an index that names what a file lacks": (index({"nothing": SINGLE}), "'nothing' is not in it"),
    "an adapter beside": (text("adapter_config.json", "{}"), "merge_and_unload"),
    "pickle only": (lambda f: (f / SINGLE).rename(f / "pytorch_model.bin") and None, "pickled weights"),
    "fp8 weights": (
        tensors(lambda t: t.update({"model.norm.weight": t["model.norm.weight"].to(torch.float8_e4m3fn)})),
        "quantised",
    ),
    "int8 weights": (
        tensors(lambda t: t.update({"model.norm.weight": t["model.norm.weight"].to(torch.int8)})),
        "quantised",
    ),
}  # fmt: skip


def refused(load: Callable[[], Any], words: str) -> None:
    with pytest.raises(FeatherError) as error:
        load()
    for part in (words, *PARTS):
        assert part in str(error.value), f"{part!r} is not in\n{error.value}"


@pytest.mark.parametrize("name", CASES)
@pytest.mark.timeout(20)
def test_a_hostile_folder_is_refused_in_words(name: str, tmp_path: Path) -> None:
    saved(tmp_path)
    change, words = CASES[name]
    change(tmp_path)
    refused(lambda: hf.load(tmp_path), words)


def test_what_is_named_in_place_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(lambda: hf.load("meta-llama/Llama-3.2-1B"), "snapshot_download")
    refused(lambda: hf.load(tmp_path / "nowhere"), "nothing is downloaded")
    saved(tmp_path / "model")
    refused(lambda: hf.load(tmp_path / "model" / SINGLE), f"ff.hf.load({str(tmp_path / 'model')!r})")
    monkeypatch.setenv("HOME", str(tmp_path))
    refused(lambda: hf.load("~/model"), f"ff.hf.load({str(tmp_path / 'model')!r})")


def test_a_head_of_its_own_is_kept_where_the_config_ties(tmp_path: Path) -> None:
    params = saved(tmp_path, TIED)
    tensors(lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))(tmp_path)
    model, again = hf.load(tmp_path)
    assert model.config.tied and torch.equal(again["embed"], params["embed"])
    tensors(lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))(tmp_path)
    model, again = hf.load(tmp_path)
    assert not model.config.tied and torch.equal(again["head"], params["embed"] + 1)


@settings(max_examples=100)
@given(st.data())
def test_changed_bytes_are_refused_or_read_as_the_library_reads_them(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    saved(folder)
    raw = bytearray((folder / SINGLE).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    (folder / SINGLE).write_bytes(raw)
    try:
        _, params = hf.load(folder)
    except FeatherError as e:
        if not all(p in str(e) for p in PARTS):
            raise
        return
    theirs = load_file(folder / SINGLE)
    assert torch.equal(params["embed"].view(torch.int32), theirs["model.embed_tokens.weight"].view(torch.int32))
    assert len(tree.leaves(params)) == len(theirs)
