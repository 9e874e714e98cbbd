"""Text as bytes: where it comes from, how it is held out, how a step's batch is read, and a baseline to beat."""

import functools as ft
import itertools as it
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from .errors import DataError, fail, message, raise_all
from .settings import Check, check, count, is_count, is_finite, text

IGNORE = -100
"""The target that counts for nothing: no loss, and not in the number of tokens."""

Batch = dict[str, torch.Tensor]
Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]

# Of the standard library only what a reader of Python would call source: not its tests (more than half of the
# bytes, much of it data), not what was installed into it, not what was generated for one machine.
_NOT_SOURCE = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages"})
_GENERATED = "_sysconfigdata"


def source_text(path: str | os.PathLike[str] | None = None) -> bytes:
    """Reads training text: a file, all text files of a folder, or Python's own standard library.

    With no path the text is the `.py` source of the standard library of the Python that runs this, 12 MB for
    CPython 3.11: all of it but its test folders and installed packages, in the order of the sorted paths. A file is
    read as it is. Of a folder all files are read that hold no zero byte, hidden files and folders left out, in the
    order of the sorted paths. Links are followed, a folder that is met again is read once. Files are joined by a
    newline. The same files give the same bytes on every machine.

    Raises:
        DataError: the path is missing, cannot be read, or holds no text.

    >>> text = source_text()
    >>> len(text) > 5_000_000, b"import os" in text
    (True, True)
    """
    call = f"source_text({'' if path is None else repr(os.fspath(path))})"
    root = Path(sysconfig.get_path("stdlib")) if path is None else Path(path)
    if not root.exists():
        fail(
            DataError,
            call=call,
            got=f"the path {str(root)!r}, seen from {os.getcwd()!r}",
            number="no file or folder is there",
            rule="training text is read from a file, or from all text files of a folder",
            fix="the path of a file or folder that exists, or no path for Python's standard library",
        )
    if not root.is_dir() and not root.is_file():
        fail(
            DataError,
            call=call,
            got=repr(str(root)),
            number="it is a pipe, socket or device, and no file",
            rule="text is read more than once, and by each rank, which a pipe gives to one reader alone",
            fix=f"a file of its own: cat {str(root)!r} > text.txt, then source_text('text.txt')",
        )
    errors: list[OSError] = []
    files = _files(root, errors, _NOT_SOURCE if path is None else frozenset()) if root.is_dir() else [root]
    if path is None:
        files = [f for f in files if f.suffix == ".py" and not f.name.startswith(_GENERATED)]
    parts = []
    for file in files:
        try:
            part = file.read_bytes()
        except OSError as error:
            errors.append(error)
            continue
        if part and (file == root or b"\0" not in part):
            parts.append(part)
    raise_all(DataError, [_unreadable(call, error) for error in errors])
    if not parts:
        fail(
            DataError,
            call=call,
            got=f"{str(root)!r}, {_plural(len(files), 'file')} looked at",
            number="0 bytes of text",
            rule="a model learns from at least one file that is not empty (in a folder: and holds no zero byte)",
            fix="a file or folder with text, such as source_text('README.md')",
        )
    return b"\n".join(parts)


def _files(root: Path, errors: list[OSError], left_out: frozenset[str]) -> list[Path]:
    """All files below a folder in the order of their paths, without hidden ones, caches, pipes and devices."""
    found, seen = [], {_identity(root)}
    for folder, below, names in os.walk(root, onerror=errors.append, followlinks=True):
        below[:] = sorted(d for d in below if not d.startswith(".") and d != "__pycache__" and d not in left_out)
        # A link may lead to a folder above, or to one that is read elsewhere.
        at = {_identity(Path(folder, d)): d for d in reversed(below)}
        below[:] = sorted(d for known, d in at.items() if known not in seen)
        seen |= at.keys()
        found += [Path(folder, n) for n in names if not n.startswith(".")]
    # A link that leads nowhere stays: reading it fails with a message, where leaving it out would be silent.
    return sorted((f for f in found if f.is_file() or not f.exists()), key=lambda f: f.relative_to(root).parts)


def _identity(folder: Path) -> tuple[int, int]:
    at = folder.stat()
    return at.st_dev, at.st_ino


def _unreadable(call: str, error: OSError) -> str:
    return message(
        call=call,
        got=f"{error.filename!r}",
        number=f"it cannot be read: {error.strerror or error}",
        rule="every file and folder of the text is read, so that the text is the same in every run",
        fix="make it readable for this user (chmod +r), or move it elsewhere",
    )


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def split(data: bytes, held_out: float = 0.05, pieces: int = 16) -> tuple[bytes, bytes]:
    """Splits text into (training, held-out): no byte of the text is in both.

    The text is cut into `pieces` equal stretches, and the last `held_out` of each is held out whole. Held-out text
    is then like all of the text, where a single tail would be only its last files, and yet it is made of long
    contiguous pieces, so that few of its bytes have training text as their context.

    Args:
        data: the text.
        held_out: the part that is held out, between 0 and 1.
        pieces: the number of contiguous held-out pieces.

    Raises:
        DataError: `held_out` is not between 0 and 1, or the text is too short for a byte of each kind in each piece.

    >>> split(b"aaaabaaaab", held_out=0.2, pieces=2)
    (b'aaaaaaaa', b'bb')
    """
    settings = {"held_out": held_out, "pieces": pieces}
    part = is_finite(held_out, above=0) and held_out < 1
    checks: list[Check] = [
        ("held_out", part, "a part of the text, between 0 and 1, is held out and not trained on", "held_out=0.05"),
        ("pieces", count(1), "held-out text is one contiguous piece or more", "pieces=16"),
    ]
    check(DataError, "split", settings, checks)
    ends = [len(data) * i // pieces for i in range(pieces + 1)]
    cuts = [end - round((end - start) * held_out) for start, end in it.pairwise(ends)]
    if any(not start < cut < end for (start, end), cut in zip(it.pairwise(ends), cuts, strict=True)):
        fail(
            DataError,
            call=text("split", settings),
            got=f"data of {_plural(len(data), 'byte')}",
            number=f"{_plural(len(data), 'byte')} in {_plural(pieces, 'piece')} are {len(data) // pieces} in each",
            rule="each piece gives at least one byte to training and one to held-out text",
            fix="more text, or fewer pieces, or held_out nearer to 0.5",
        )
    training = b"".join(data[start:cut] for start, cut in zip(ends, cuts, strict=False))
    return training, b"".join(data[cut:end] for cut, end in zip(cuts, ends[1:], strict=True))


class Batches:
    """Batches of training text by number: `batches[step]` depends on the seed and the step alone.

    There is no hidden state, so the position in the data is a plain integer of the training state, every rank can
    make the same global batch for itself, and a resumed run reads on where it stopped. Steps have no end: each epoch
    reads every window of `seq` bytes once, in an order of its own and from a start of its own.

    `batches[step]` is a dict of int64 tensors [batch, seq]: `tokens`, the bytes; `targets`, the byte after each;
    `positions`, the place of each in its window, from 0.

    Args:
        data: the text; it is not copied.
        batch: sequences in a global batch.
        seq: bytes in a sequence.
        seed: seed of the order.

    Raises:
        DataError: `batch` or `seq` is not a positive integer, the seed is negative, or the text has fewer than
            `seq + 1` bytes.
        IndexError: a step below 0.

    >>> batches = Batches(bytes(range(100)), batch=2, seq=4, seed=0)
    >>> batch = batches[7]
    >>> batch["tokens"].shape, bool((batch["targets"] == batch["tokens"] + 1).all())
    (torch.Size([2, 4]), True)
    >>> batches.epoch_steps
    12.0
    """

    def __init__(self, data: bytes, batch: int, seq: int, seed: int = 0):
        _check_sizes("Batches", data, {"batch": batch, "seq": seq, "seed": seed}, windows=True)
        self.batch, self.seq, self.seed = batch, seq, seed
        self._bytes: Bytes = np.frombuffer(data, dtype=np.uint8)
        # A window more than these may fit, which leaves room for the start of an epoch to move.
        self._windows = max(1, (len(data) - seq) // seq)
        self._starts = min(seq, len(data) - self._windows * seq)

    @property
    def epoch_steps(self) -> float:
        """Steps in which the text is read once; the steps after them read it again in another order."""
        return self._windows / self.batch

    def __getitem__(self, step: int) -> Batch:
        if step < 0:
            raise IndexError(f"batches[{step}]: a step counts from 0")
        samples = np.arange(step * self.batch, (step + 1) * self.batch, dtype=np.int64)
        epochs, places = np.divmod(samples, self._windows)
        at = np.empty_like(samples)
        for epoch in np.unique(epochs):
            inside = epochs == epoch
            at[inside] = _order(self._windows, self._starts, self.seq, self.seed, int(epoch))[places[inside]]
        return _windows(self._bytes, at, self.seq)


@ft.lru_cache(maxsize=4)
def _order(windows: int, starts: int, seq: int, seed: int, epoch: int) -> Ints:
    """First byte of each window of an epoch, in the order of reading."""
    random = np.random.default_rng([seed, epoch])
    return int(random.integers(starts)) + seq * random.permutation(windows)


def _windows(data: Bytes, at: Ints, seq: int) -> Batch:
    """The windows of `seq` bytes that start at `at`, and the byte after each byte."""
    here = np.arange(seq, dtype=np.int64)
    read = data[at[:, None] + np.arange(seq + 1, dtype=np.int64)].astype(np.int64)
    return {
        "tokens": torch.from_numpy(read[:, :-1].copy()),
        "targets": torch.from_numpy(read[:, 1:].copy()),
        "positions": torch.from_numpy(np.tile(here, (len(at), 1))),
    }


def eval_batches(data: bytes, batch: int, seq: int) -> Iterator[Batch]:
    """Batches that predict every byte of `data` but its first exactly once, in order.

    All batches have the shape [batch, seq], as those of `Batches`. What is missing at the end is token 0 with target
    -100, which no loss counts: the targets that count are `len(data) - 1`. Each window starts with no context, so the
    figure for a model is a little pessimistic, the more so the shorter `seq`.

    Raises:
        DataError: at once, when `batch` or `seq` is not a positive integer, or the text has fewer than 2 bytes.

    >>> [b["targets"].tolist() for b in eval_batches(b"abcd", batch=1, seq=2)]
    [[[98, 99]], [[100, -100]]]
    """
    _check_sizes("eval_batches", data, {"batch": batch, "seq": seq}, windows=False)
    return _eval_batches(np.frombuffer(data, dtype=np.uint8), batch, seq)


def _eval_batches(data: Bytes, batch: int, seq: int) -> Iterator[Batch]:
    size = batch * seq
    for start in range(0, len(data) - 1, size):
        tokens = np.zeros(size, dtype=np.int64)
        targets = np.full(size, IGNORE, dtype=np.int64)
        after = data[start + 1 : start + 1 + size]
        tokens[: len(after)] = data[start : start + len(after)]
        targets[: len(after)] = after
        yield {
            "tokens": torch.from_numpy(tokens.reshape(batch, seq)),
            "targets": torch.from_numpy(targets.reshape(batch, seq)),
            "positions": torch.arange(seq).repeat(batch, 1),
        }


def _check_sizes(name: str, data: bytes, settings: dict[str, int], windows: bool) -> None:
    """Refuses sizes that are no sizes, and a text too short for one target, or for one whole window."""
    rules = {
        "batch": (1, "a batch has one sequence or more", "batch=8"),
        "seq": (1, "a sequence has one token or more", "seq=256"),
        "seed": (0, "a seed is an integer, and not negative", "seed=0"),
    }
    checks = [(key, count(rules[key][0]), *rules[key][1:]) for key in settings]
    check(DataError, name, settings, checks)
    shortest = settings["seq"] + 1 if windows else 2
    if len(data) < shortest:
        fail(
            DataError,
            call=text(name, settings),
            got=f"data of {_plural(len(data), 'byte')}",
            number=f"{len(data)} is less than {shortest}",
            rule="every token has a target, the byte after it, so a sequence needs one byte more than its length",
            fix=f"seq={len(data) - 1} or less, or more text" if len(data) > 1 else "more text",
        )


def ngram_bits(train: bytes, held_out: bytes, order: int = 2) -> float:
    """Bits per byte that a byte model of contexts of `order` bytes gets on `held_out`: the baseline to beat.

    With n(h c) the number of times that byte c follows context h in `train`, n(h) their sum over c, t(h) the number of
    different bytes seen after h, and h' the context h without its oldest byte, the model is

        p(c | h) = (n(h c) + t(h) p(c | h')) / (n(h) + t(h)),

    interpolated down to the empty context and then to p = 1/256, so that nothing has probability 0. All bytes are
    counted, the first ones of `held_out` with the shorter contexts that they have. Memory is about 40 bytes a byte of
    `train`; an order-2 model of 12 MB takes about a second.

    Raises:
        DataError: an empty text, or an order that is not one of 0 to 6.

    Source: Witten and Bell, "The zero-frequency problem", IEEE Trans. Inf. Theory 37 (1991), method C; interpolated
    as in Chen and Goodman, "An empirical study of smoothing techniques for language modeling" (1999), section 2.4.

    >>> [round(ngram_bits(b"ab" * 1000, b"ab" * 100, order), 2) for order in (0, 1)]
    [1.0, 0.01]
    """
    known = {"train": len(train), "held_out": len(held_out), "order": order}
    rule, fix = "a model is counted on one text and measured on another", "train, held_out = split(source_text())"
    checks = [
        ("train", len(train) > 0, rule, fix),
        ("held_out", len(held_out) > 0, rule, fix),
        ("order", is_count(order, 0) and order <= 6, "a context and the byte after it fit in 64 bits", "order=2"),
    ]
    check(DataError, "ngram_bits", known, checks)
    p = np.full(len(held_out), 1 / 256)
    for length in range(min(order, len(held_out) - 1, len(train) - 1) + 1):
        grams, counts = np.unique(_grams(train, length + 1), return_counts=True)
        starts = np.flatnonzero(np.diff(grams >> 8, prepend=-1))
        contexts = grams[starts] >> 8
        asked = _grams(held_out, length + 1)
        n = _lookup(grams, counts, asked)
        total = _lookup(contexts, np.add.reduceat(counts, starts), asked >> 8)
        kinds = _lookup(contexts, np.diff(starts, append=len(grams)), asked >> 8)
        # A context that was never seen has n = total = kinds = 0 and says nothing: p stays.
        p[length:] = np.where(total > 0, (n + kinds * p[length:]) / np.maximum(total + kinds, 1), p[length:])
    return -float(np.log2(p).mean())


def _grams(data: bytes, length: int) -> Ints:
    """Every run of `length` bytes as one number, the oldest byte most significant."""
    bytes_: Bytes = np.frombuffer(data, dtype=np.uint8)
    out = np.zeros(len(data) - length + 1, dtype=np.int64)
    for i in range(length):
        out = out << 8 | bytes_[i : len(data) - length + 1 + i]
    return out


def _lookup(keys: Ints, values: Ints, wanted: Ints) -> Ints:
    """The value of each wanted key, 0 where it is not among the sorted `keys`."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0)
