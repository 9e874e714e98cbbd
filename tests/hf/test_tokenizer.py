"""Tokenizers: of a file, or bytes."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

import fx_feather as ff
from fx_feather import hf
from fx_feather.errors import DataError
from fx_feather.hf.tokenizer import Bytes
from fx_feather.models.llama import LlamaConfig


@given(st.text())
def test_bytes_give_every_text_back(text):
    assert Bytes().decode(Bytes().encode(text)) == text


def made(folder):
    inner = Tokenizer(models.WordLevel({"to": 0, "be": 1, "or": 2, "?": 3}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.save(str(folder / "tokenizer.json"))
    return inner


def test_a_file_is_read(tmp_path):
    inner, ours = made(tmp_path), hf.tokenizer(tmp_path)
    assert ours.encode("to be or") == inner.encode("to be or").ids == [0, 1, 2]
    assert ours.decode([2, 1]) == "or be"


def test_without_a_file_tokens_are_bytes(tmp_path):
    assert hf.tokenizer(tmp_path).encode("é") == [195, 169]


def test_a_missing_library_is_named(tmp_path, monkeypatch):
    made(tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError) as error:
        hf.tokenizer(tmp_path)
    for word in ("1 package is missing: tokenizers", 'pip install "fx_feather[tokenizers]"', "rule:"):
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tokenizer.model", ["tokenizer.model", "another kind", "save_pretrained"]),
        ("vocab.json", ["vocab.json", "another kind"]),
        ("tokenizer.json", ["the tokenizers library refuses it"]),
        (None, ["there is no such folder"]),
    ],
)
def test_bytes_never_stand_in_for_a_tokenizer(name, words, tmp_path):
    if name is not None:
        (tmp_path / name).write_text("{")
    with pytest.raises(DataError) as error:
        hf.tokenizer(tmp_path if name else tmp_path / "none")
    for word in [*words, "got:", "rule:", "fix:"]:
        assert word in str(error.value)


def test_a_model_keeps_its_tokenizer_and_generation_config(tmp_path):
    inner = made(tmp_path)
    model = hf.Model(LlamaConfig(vocab=19, layers=1, embed=8, heads=2, kv_heads=1, mlp=8))
    hf.save(tmp_path, model, ff.init(model.template))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7}')
    hf.save(tmp_path / "again", *hf.load(tmp_path))
    assert (tmp_path / "again" / "generation_config.json").read_text() == '{"eos_token_id": 7}'
    assert hf.tokenizer(tmp_path / "again").encode("to be") == inner.encode("to be").ids
