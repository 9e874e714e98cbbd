"""Saving over a model: killed at any moment, the folder holds the old model or the new one."""

import dataclasses
import itertools as it
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

import fx_feather as ff
from fx_feather import hf, tree
from fx_feather.errors import FeatherError
from fx_feather.models.llama import LlamaConfig

TINY = LlamaConfig(vocab=7, layers=1, embed=4, heads=2, kv_heads=1, mlp=4)


def made(seed, **changes):
    model = hf.Model(
        dataclasses.replace(TINY, **changes), files={"generation_config.json": b'{"eos_token_id": %d}' % seed}
    )
    return model, ff.init(model.template, seed)


def same(one, two):
    return (
        one[0].config == two[0].config
        and one[0].files == two[0].files
        and all(torch.equal(a, b) for a, b in zip(tree.leaves(one[1]), tree.leaves(two[1]), strict=True))
    )


class Killed(BaseException):
    """Not an Exception: nothing tidies up after a kill."""


def killed_at(k, monkeypatch, do):
    """Ends `do` before its k-th call that changes the disk; True if it came to its end."""
    count = it.count()

    def watched(inner):
        def call(*args, **options):
            if next(count) == k:
                raise Killed
            return inner(*args, **options)

        return call

    opened = Path.open

    def opening(self, mode="r", *args, **options):
        if "w" in mode:
            if next(count) == k:
                raise Killed
            file = opened(self, mode, *args, **options)
            if next(count) == k:
                # Some of its bytes are written.
                file.write(b"some")
                file.close()
                raise Killed
            return file
        return opened(self, mode, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", opening)
        patch.setattr(Path, "unlink", watched(Path.unlink))
        for name in ("rename", "replace", "unlink", "mkdir", "rmdir", "fsync"):
            # Whether bytes reach the disk doesn't show here, only when they are asked to.
            patch.setattr(os, name, watched((lambda _: None) if name == "fsync" else getattr(os, name)))
        try:
            do()
        except Killed:
            return False
    return True


SHARDS = {"one file": 1 << 30, "several": 400, "more": 250}


@pytest.mark.parametrize(("before", "after"), [("one file", "several"), ("several", "one file"), ("several", "more")])
def test_killed_at_any_moment_the_old_or_the_new_model_is_there(before, after, tmp_path, monkeypatch):
    old, new = made(1), made(2, rope_theta=500.0)
    start, folder = tmp_path / "start", tmp_path / "model"
    hf.save(start, *old, shard_bytes=SHARDS[before])
    seen = []
    for k in it.count():
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(start, folder)
        done = killed_at(k, monkeypatch, lambda: hf.save(folder, *new, shard_bytes=SHARDS[after]))
        now = hf.load(folder)
        seen.append("old" if same(now, old) else "new" if same(now, new) else "mixed")
        _others_never_read_a_mixture(folder, start)
        if done:
            break
        # Whatever was left, the next save is whole, also when it is killed as late as the first was.
        killed_at(k, monkeypatch, lambda: hf.save(folder, *old, shard_bytes=SHARDS[before]))
        assert same(hf.load(folder), old) or same(hf.load(folder), new)
        hf.save(folder, *old, shard_bytes=SHARDS[before])
        assert same(hf.load(folder), old)
        assert {f.name: f.read_bytes() for f in folder.iterdir()} == {f.name: f.read_bytes() for f in start.iterdir()}
    assert seen == ["old"] * seen.count("old") + ["new"] * seen.count("new") and len(set(seen)) == 2 and len(seen) > 12


def _others_never_read_a_mixture(folder, start):
    """Who doesn't know of unfinished saves finds one model, or no config."""
    if not (folder / "config.json").exists():
        return
    config = (folder / "config.json").read_bytes()
    files = {f.name: f.read_bytes() for f in folder.glob("model*")}
    old = config == (start / "config.json").read_bytes()
    assert (files == {f.name: f.read_bytes() for f in start.glob("model*")}) == old


def test_a_first_save_that_is_killed_leaves_no_model_or_the_new_one(tmp_path, monkeypatch):
    new = made(3)
    for k in it.count():
        folder = tmp_path / str(k)
        if killed_at(k, monkeypatch, lambda at=folder: hf.save(at, *new, shard_bytes=150)):
            break
        try:
            assert same(hf.load(folder), new)
        except FeatherError as e:
            assert "config.json" in str(e) or "no such folder" in str(e)  # noqa: PT017


def test_what_an_older_model_left_is_gone_and_the_rest_stays(tmp_path):
    old, new = made(1, layers=3), made(2)
    hf.save(tmp_path, *old, shard_bytes=100)
    (tmp_path / "README.md").write_text("mine")
    hf.save(tmp_path, *new)
    names = {f.name for f in tmp_path.iterdir()}
    assert names == {"README.md", "config.json", "generation_config.json", "model.safetensors"}
    (tmp_path / "generation_config.json").unlink()
    theirs = LlamaForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(theirs.model.embed_tokens.weight, new[1]["embed"])
    assert theirs.config.num_hidden_layers == 1
    hf.save(tmp_path, *old, shard_bytes=100)
    assert not (tmp_path / "model.safetensors").exists() and same(hf.load(tmp_path), old)


def test_a_save_that_fails_leaves_the_old_model_and_nothing_beside(tmp_path, monkeypatch):
    old = made(1)
    hf.save(tmp_path, *old)
    monkeypatch.setattr("fx_feather.hf.folder.put", lambda *a: (_ for _ in ()).throw(OSError("no space left")))
    with pytest.raises(OSError, match="no space left"):
        hf.save(tmp_path, *made(2))
    assert same(hf.load(tmp_path), old) and not (tmp_path / ".saving").exists()


def test_a_model_that_is_replaced_while_it_is_read_is_an_error(tmp_path, monkeypatch):
    hf.save(tmp_path, *made(1), shard_bytes=150)
    read = hf.file.Entry.read
    calls = it.count()

    def replaced(self, slices):
        if next(calls) == 2:
            hf.save(tmp_path, *made(2), shard_bytes=150)
        return read(self, slices)

    monkeypatch.setattr(hf.file.Entry, "read", replaced)
    with pytest.raises(FeatherError, match=r"written again|another model was saved"):
        hf.load(tmp_path)


def test_fine_tuning_in_float32_is_not_rounded_away(tmp_path):
    model, params = made(1, dtype=torch.bfloat16)
    hf.save(tmp_path / "half", model, params)
    model, wide = hf.load(tmp_path / "half", dtype=torch.float32)
    assert model.config.dtype == torch.float32
    tuned = tree.map(lambda x: x + 1e-5, wide)
    hf.save(tmp_path / "tuned", model, tuned)
    theirs = LlamaForCausalLM.from_pretrained(tmp_path / "tuned")
    assert torch.equal(theirs.model.embed_tokens.weight, tuned["embed"])
    # The dtype of what is saved counts, also where the parameters were cast after loading.
    model, half = hf.load(tmp_path / "half")
    hf.save(tmp_path / "cast", model, tree.map(lambda x: x.float() + 1e-5, half))
    assert json.loads((tmp_path / "cast" / "config.json").read_text())["dtype"] == "float32"
    config = json.loads((tmp_path / "half" / "config.json").read_text()) | {"dtype": "float32", "torch_dtype": None}
    (tmp_path / "half" / "config.json").write_text(json.dumps(config))
    model, _ = hf.load(tmp_path / "half")
    cache = model.family.module.cache_template(model.config, 1, 4)
    assert {p.dtype for p in tree.leaves(cache)} == {torch.bfloat16}
