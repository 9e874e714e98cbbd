"""Text to tokens and back: by the tokenizer of a folder, or by bytes."""

import os
from pathlib import Path
from typing import NoReturn, Protocol

from ..errors import DataError, fail
from .file import odd
from .swap import locate


class Tokenizer(Protocol):
    """Anything with these two."""

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""
        ...

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens."""
        ...


class Bytes:
    """The 256 bytes of UTF-8 as tokens: it needs no file, and has a token for every text.

    >>> Bytes().encode("é!"), Bytes().decode([195, 169, 33])
    ([195, 169, 33], 'é!')
    """

    def encode(self, text: str) -> list[int]:
        """The bytes of a text."""
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        """The text of bytes; what is no UTF-8 becomes a question mark in a diamond."""
        return bytes(tokens).decode(errors="replace")


class FromFile:
    """The tokenizer of a `tokenizer.json`, by the `tokenizers` library.

    No special token is added: what begins and ends a document is for data to say.
    """

    def __init__(self, path: Path):
        try:
            import tokenizers
        except ImportError:
            fail(
                DataError,
                call=f"ff.hf.tokenizer({str(path.parent)!r})",
                got=path.name,
                number="1 package is missing: tokenizers",
                rule="files of tokenizers are read by the library that writes them, an optional extra",
                fix='pip install "fx_feather[tokenizers]"',
            )
        try:
            self._inner = tokenizers.Tokenizer.from_file(str(path))
        # The library raises a bare Exception for a file that it can't read.
        except Exception as e:
            _refuse(path.parent, path.name, f"the tokenizers library refuses it: {e}", "the file, copied again")

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""
        return list(self._inner.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens, special ones too."""
        return str(self._inner.decode(tokens, skip_special_tokens=False))


OTHERS = (
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)
"""Files by which other libraries know a tokenizer; a text in bytes would be nonsense to the model beside them."""


def tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer of a folder, from `tokenizer.json`; bytes where the folder has no tokenizer of any kind.

    Raises:
        DataError: no such folder, a `tokenizer.json` that can't be read or no library to read it with, or a tokenizer
            of another kind.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     tokenizer(folder).encode("ab")
    [97, 98]
    """
    at = Path(folder)
    if not at.is_dir():
        fix = f"ff.hf.tokenizer({str(at.parent)!r})" if at.is_file() else "the folder that a model was saved to"
        _refuse(at, str(at), "it is a file" if at.is_file() else "there is no such folder", fix)
    path = locate(at, "tokenizer.json")
    wrong = odd(path)
    if wrong is None:
        return FromFile(path)
    if wrong != "it is missing":
        _refuse(at, path.name, wrong, "the file, copied again")
    there = [name for name in OTHERS if os.path.lexists(locate(at, name))]
    if there:
        fix = f"AutoTokenizer.from_pretrained({str(at)!r}).save_pretrained({str(at)!r}), which writes tokenizer.json"
        _refuse(at, ", ".join(there), "a tokenizer of another kind than tokenizer.json", fix)
    return Bytes()


def _refuse(folder: Path, got: str, number: str, fix: str) -> NoReturn:
    fail(
        DataError,
        call=f"ff.hf.tokenizer({str(folder)!r})",
        got=got,
        number=number,
        rule="tokens mean what they meant in training; bytes stand in only where there is no tokenizer at all",
        fix=fix,
    )
