"""A save that is killed at any moment leaves the old model or the new one; one process writes a folder at a time."""

import fcntl
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import fx_feather as ff
from fx_feather import hf, tree
from fx_feather.errors import ShapeError
from fx_feather.models.llama import LlamaConfig

SMALL = LlamaConfig(vocab=11, layers=1, embed=4, heads=2, kv_heads=1, mlp=6)
WIDE = LlamaConfig(vocab=11, layers=1, embed=4, heads=2, kv_heads=1, mlp=6, dtype=torch.float64, rope_theta=500.0)
ONE, MANY = 1 << 30, 300


class Killed(BaseException):
    """Stands for a signal: nothing catches it."""


def made(config: LlamaConfig, seed: int) -> tuple[hf.Model, Any]:
    model = hf.Model(config)
    return model, ff.init(model.template, seed)


def same(one: Any, two: Any) -> bool:
    return all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(tree.leaves(one), tree.leaves(two), strict=True)
    )


@pytest.fixture
def killer(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Counts what changes the disk, and kills before the one whose number is given."""
    at = {"now": 0, "kill": -1}

    def counted(fn: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            at["now"] += 1
            if at["now"] == at["kill"]:
                raise Killed
            return fn(*args, **kwargs)

        return call

    for module, name in ((os, "replace"), (os, "fsync"), (Path, "unlink"), (Path, "write_text"), (Path, "open")):
        monkeypatch.setattr(module, name, counted(getattr(module, name)))
    return at


@pytest.mark.parametrize(("before", "after"), [(ONE, ONE), (ONE, MANY), (MANY, ONE), (MANY, 500)])
def test_a_kill_between_any_two_writes(before: int, after: int, tmp_path: Path, killer: dict[str, int]) -> None:
    old, new = made(SMALL, 0), made(WIDE, 1)
    seen, kill = set(), 1
    while True:
        folder = tmp_path / str(kill)
        killer["kill"] = -1
        hf.save(folder, *old, shard_bytes=before)
        (folder / "notes.txt").write_text("mine")
        killer["now"], killer["kill"] = 0, kill
        try:
            hf.save(folder, *new, shard_bytes=after)
            done = True
        except Killed:
            done = False
        killer["kill"] = -1
        model, params = hf.load(folder)
        is_new = same(params, new[1]) if model.config == WIDE else False
        assert is_new or (model.config == SMALL and same(params, old[1])), f"killed before write {kill}"
        seen.add(is_new)
        hf.save(folder, *new, shard_bytes=after)
        model, params = hf.load(folder)
        assert model.config == WIDE and same(params, new[1])
        left = {p.name for p in folder.iterdir()} - {"notes.txt", "config.json"}
        weights = {n for n in left if n.endswith(".safetensors")}
        assert left - weights <= {"model.safetensors.index.json"} and (folder / "notes.txt").read_text() == "mine"
        assert len(weights) == (1 if after == ONE else len(weights)) and ("model.safetensors" in weights) == (
            after == ONE
        )
        if done:
            break
        kill += 1
    assert seen == {True, False} and kill > 8


@pytest.mark.parametrize(("before", "after"), [(ONE, MANY), (MANY, ONE)])
def test_older_files_are_not_read_by_anyone(before: int, after: int, tmp_path: Path) -> None:
    old, new = made(SMALL, 0), made(SMALL, 1)
    hf.save(tmp_path, *old, shard_bytes=before)
    hf.save(tmp_path, *new, shard_bytes=after)
    assert same(hf.load(tmp_path)[1], new[1])
    theirs = LlamaForCausalLM.from_pretrained(tmp_path).state_dict()["model.embed_tokens.weight"]
    assert torch.equal(theirs, new[1]["embed"])


def test_two_processes_do_not_write_one_folder(tmp_path: Path) -> None:
    other = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ShapeError, match="2 processes write into one folder"):
            hf.save(tmp_path, *made(SMALL, 0))
    finally:
        os.close(other)
    hf.save(tmp_path, *made(SMALL, 0))


def test_a_wide_copy_of_a_narrow_model_stays_wide(tmp_path: Path) -> None:
    narrow = LlamaConfig(**{**vars(SMALL), "dtype": torch.bfloat16})
    hf.save(tmp_path, *made(narrow, 0))
    model, params = hf.load(tmp_path, dtype=torch.float32)
    assert model.config.dtype == torch.float32
    params = tree.map(lambda x: x + 1e-4, params)
    hf.save(tmp_path, model, params)
    assert same(hf.load(tmp_path)[1], params)
    theirs = LlamaForCausalLM.from_pretrained(tmp_path).state_dict()["model.embed_tokens.weight"]
    assert theirs.dtype == torch.float32 and torch.equal(theirs, params["embed"])
    # The word follows the bits, also where the model was not loaded.
    hf.save(tmp_path, hf.Model(narrow), params)
    assert same(hf.load(tmp_path)[1], params)
