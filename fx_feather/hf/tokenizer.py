"""Text to tokens and back: by the tokenizer of a folder, or by bytes."""

from pathlib import Path
from typing import Protocol

from ..errors import DataError, fail


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
        self._inner = tokenizers.Tokenizer.from_file(str(path))

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""
        return list(self._inner.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens, special ones too."""
        return str(self._inner.decode(tokens, skip_special_tokens=False))


def tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer of a folder, from `tokenizer.json`; bytes where there is none.

    Raises:
        DataError: a `tokenizer.json`, but no library to read it with.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     tokenizer(folder).encode("ab")
    [97, 98]
    """
    path = Path(folder) / "tokenizer.json"
    return FromFile(path) if path.exists() else Bytes()
