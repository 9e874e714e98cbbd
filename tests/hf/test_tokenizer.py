"""Tokenizers: of a file, or bytes."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from fx_feather import hf
from fx_feather.errors import DataError
from fx_feather.hf.tokenizer import Bytes


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
