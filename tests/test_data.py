"""Text, split, batches and the n-gram baseline: what is read, in which order, and what is refused."""

import os
import random
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fx_feather.data import IGNORE, Batches, eval_batches, ngram_bits, source_text, split
from fx_feather.errors import DataError, FeatherError


def refused(call, *said: str) -> str:
    """Runs a call that must raise DataError with five parts, and looks for words in its message."""
    with pytest.raises(DataError) as caught:
        call()
    text = str(caught.value)
    for part in ("got:", "problem:", "rule:", "fix:", *said):
        assert part in text, f"{part!r} is not in:\n{text}"
    return text


# Text.


def test_the_standard_library_is_large_the_same_each_time_and_without_its_tests():
    text = source_text()
    assert len(text) > 5_000_000
    assert text == source_text()
    assert Path(os.__file__).read_bytes() in text
    assert b"class BaseTestCase(unittest.TestCase)" not in text


def test_a_file_is_read_as_it_is(tmp_path):
    (tmp_path / "a").write_bytes(b"\0any bytes\xff")
    assert source_text(tmp_path / "a") == b"\0any bytes\xff"


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path):
    for name, content in {"b.txt": b"B", "a/z.md": b"Z", "a/y.py": b"Y", "c": b"C"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    for name in ("picture", ".hidden", "__pycache__/x.py", ".git/config", "empty"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"not text\0" if name == "picture" else b"" if name == "empty" else b"no")
    assert source_text(str(tmp_path)) == b"Y\nZ\nB\nC"


def test_a_folder_with_a_pipe_in_it_is_read_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "text").write_bytes(b"text")
    assert source_text(tmp_path) == b"text"


def test_a_missing_file_is_refused(tmp_path):
    refused(lambda: source_text(tmp_path / "nowhere.txt"), "source_text(", "nowhere.txt", "no file or folder is there")


def test_an_empty_file_is_refused(tmp_path):
    (tmp_path / "empty.txt").touch()
    refused(lambda: source_text(tmp_path / "empty.txt"), "empty.txt", "1 file looked at", "0 bytes of text")


def test_an_empty_folder_is_refused(tmp_path):
    refused(lambda: source_text(tmp_path), "0 files looked at", "0 bytes of text")


def test_a_folder_of_pictures_is_refused(tmp_path):
    for name in "ab":
        (tmp_path / name).write_bytes(b"\0\1\2")
    refused(lambda: source_text(tmp_path), "2 files looked at", "holds no zero byte")


def test_all_unreadable_files_are_named_at_once(tmp_path):
    (tmp_path / "good").write_bytes(b"text")
    for name in ("loop", "gone"):
        (tmp_path / name).symlink_to(tmp_path / ("loop" if name == "loop" else "nowhere"))
    text = refused(lambda: source_text(tmp_path), "2 problems:", "cannot be read", "No such file", "symbolic links")
    assert str(tmp_path / "loop") in text and str(tmp_path / "gone") in text


def test_a_folder_that_cannot_be_listed_is_refused(tmp_path, monkeypatch):
    def closed(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", closed)
    refused(lambda: source_text(tmp_path), str(tmp_path), "cannot be read: Permission denied", "chmod +r")


# Split.


@settings(deadline=None)
@given(size=st.integers(200, 5000), held_out=st.floats(0.1, 0.9), pieces=st.integers(1, 16))
def test_no_byte_is_in_both_parts_and_none_is_lost(size, held_out, pieces):
    data = bytes(np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8))
    training, held = split(data, held_out, pieces)
    assert len(training) + len(held) == size
    assert Counter(training) + Counter(held) == Counter(data)
    assert abs(len(held) - held_out * size) <= pieces


def test_held_out_text_is_in_whole_pieces_spread_over_the_text():
    training, held = split(bytes(range(250)), held_out=0.2, pieces=5)
    assert list(held) == [b for start in (40, 90, 140, 190, 240) for b in range(start, start + 10)]
    assert set(training) == set(range(250)) - set(held)


@pytest.mark.parametrize("held_out", [0, 1, -0.1, 1.5, float("nan")])
def test_held_out_must_be_a_part(held_out):
    refused(
        lambda: split(b"text" * 100, held_out), f"held_out={held_out!r}", f"held_out is {held_out!r}", "between 0 and 1"
    )


def test_split_needs_text_for_every_piece():
    refused(lambda: split(b"short", pieces=16), "5 bytes in 16 pieces are 0 in each", "fewer pieces")
    refused(lambda: split(b"", pieces=1), "0 bytes in 1 piece")
    refused(lambda: split(b"text", pieces=0), "pieces=0", "pieces is 0", "one contiguous piece or more")
    refused(lambda: split(b"text", held_out=2, pieces=0), "2 problems:", "held_out is 2", "pieces is 0")


# Batches.

TEXT = bytes(random.Random(0).randbytes(5000))


def test_a_batch_is_windows_of_the_text():
    batch = Batches(TEXT, batch=8, seq=32, seed=1)[3]
    assert {k: (v.dtype, tuple(v.shape)) for k, v in batch.items()} == dict.fromkeys(
        ("tokens", "targets", "positions"), (torch.int64, (8, 32))
    )
    assert torch.equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])
    assert torch.equal(batch["positions"], torch.arange(32).repeat(8, 1))
    for row, after in zip(batch["tokens"].tolist(), batch["targets"].tolist(), strict=True):
        assert bytes(row) + bytes(after[-1:]) in TEXT


def test_a_batch_depends_on_seed_and_step_alone():
    one, other = Batches(TEXT, 4, 16, seed=5), Batches(TEXT, 4, 16, seed=5)
    forward = [one[s] for s in range(200)]
    for step in reversed(range(200)):
        assert all(torch.equal(forward[step][k], other[step][k]) for k in forward[step])
    assert not torch.equal(one[0]["tokens"], one[1]["tokens"])
    assert not torch.equal(one[0]["tokens"], Batches(TEXT, 4, 16, seed=6)[0]["tokens"])


@settings(deadline=None)
@given(size=st.integers(2, 400), batch=st.integers(1, 9), seq=st.integers(1, 40))
def test_each_epoch_reads_each_window_once(size, batch, seq):
    if size < seq + 1:
        return
    # Windows are told apart by what they hold: an epoch is those of one start, laid end to end, in some order.
    data = np.random.default_rng(size).bytes(size)
    batches = Batches(data, batch, seq, seed=size)
    windows = round(batches.epoch_steps * batch)
    assert windows * seq >= size - 2 * seq  # little more than one window is left out at the ends
    rows = [bytes(r) for s in range(-(-2 * windows // batch)) for r in batches[s]["tokens"].numpy().astype(np.uint8)]
    for epoch in (rows[:windows], rows[windows : 2 * windows]):
        at = [s for s in range(seq) if Counter(data[s + seq * i :][:seq] for i in range(windows)) == Counter(epoch)]
        assert at, "an epoch is not a permutation of windows laid end to end"


def test_epochs_differ_in_order_and_start():
    batches = Batches(bytes(range(256)), batch=31, seq=8, seed=0)
    assert batches.epoch_steps == 1
    firsts = [batches[s]["tokens"][:, 0].tolist() for s in range(4)]
    assert len({first[0] % 8 for first in firsts}) > 1
    assert len({tuple(b // 8 for b in first) for first in firsts}) == 4


def test_a_batch_is_cheap():
    data = np.random.default_rng(0).bytes(10_000_000)
    batches = Batches(data, batch=32, seq=256, seed=0)
    batches[0]
    start = time.process_time()
    for step in range(50):
        batches[step]
    assert (time.process_time() - start) / 50 < 0.01


def test_writing_to_a_batch_does_not_change_the_text():
    batches = Batches(TEXT, 2, 8)
    batches[0]["tokens"].zero_()
    assert batches[0]["tokens"].any()


def test_a_step_below_zero_is_no_step():
    with pytest.raises(IndexError, match="counts from 0"):
        Batches(TEXT, 2, 8)[-1]


@pytest.mark.parametrize("make", [Batches, eval_batches])
def test_batch_sizes_are_refused_all_at_once_and_at_once(make):
    refused(lambda: make(TEXT, batch=0, seq=8), "batch=0", "batch is 0", "one sequence or more")
    refused(lambda: make(TEXT, batch=2, seq=-8), "seq=-8", "seq is -8", "one token or more")
    refused(lambda: make(TEXT, batch=2.5, seq=8), "batch=2.5", "batch is 2.5")
    refused(lambda: make(TEXT, batch=0, seq=0), "2 problems:", "batch=0", "seq=0")


def test_text_too_short_for_a_sequence_is_refused():
    refused(lambda: Batches(b"12345678", 1, 8), "8 bytes", "8 is less than 9", "seq=7 or less")
    assert Batches(b"123456789", 1, 8)[0]["tokens"].shape == (1, 8)
    refused(lambda: Batches(b"", 1, 8), "0 bytes", "more text")
    refused(lambda: eval_batches(b"1", 1, 8), "1 byte", "1 is less than 2")
    refused(lambda: Batches(TEXT, 1, 8, seed=-1), "seed=-1", "seed is -1", "not negative")


@settings(deadline=None)
@given(data=st.binary(min_size=2, max_size=200), batch=st.integers(1, 5), seq=st.integers(1, 20))
def test_evaluation_predicts_every_byte_but_the_first_once(data, batch, seq):
    batches = list(eval_batches(data, batch, seq))
    assert all(v.shape == (batch, seq) and v.dtype == torch.int64 for b in batches for v in b.values())
    targets = torch.cat([b["targets"].flatten() for b in batches])
    tokens = torch.cat([b["tokens"].flatten() for b in batches])
    counted = targets != IGNORE
    assert bytes(targets[counted].tolist()) == data[1:]
    assert bytes(tokens[counted].tolist()) == data[:-1]
    assert counted[: len(data) - 1].all() and not tokens[~counted].any()
    assert all(torch.equal(b["positions"], torch.arange(seq).repeat(batch, 1)) for b in batches)


# The baseline.


def by_hand(train: bytes, held_out: bytes, order: int) -> float:
    """The formula of the docstring with dicts, one byte at a time."""
    counts = Counter(train[i : i + k + 1] for k in range(order + 1) for i in range(len(train) - k))

    def p(context: bytes, byte: int) -> float:
        lower = 1 / 256 if not context else p(context[1:], byte)
        after = {c: n for c in range(256) if (n := counts[context + bytes([c])])}
        total = sum(after.values())
        return (after.get(byte, 0) + len(after) * lower) / (total + len(after)) if total else lower

    bits = [-np.log2(p(held_out[max(0, i - order) : i], held_out[i])) for i in range(len(held_out))]
    return float(np.mean(bits))


@settings(deadline=None)
@given(
    train=st.text("abc\xff", min_size=1, max_size=60).map(lambda s: s.encode("latin1")),
    held_out=st.text("abcd\xff", min_size=1, max_size=40).map(lambda s: s.encode("latin1")),
    order=st.integers(0, 4),
)
def test_the_baseline_is_its_formula(train, held_out, order):
    assert ngram_bits(train, held_out, order) == pytest.approx(by_hand(train, held_out, order), rel=1e-12)


def test_the_baseline_is_a_distribution():
    train = b"a text to learn from, and a context in it"
    for context in (b"te", b"zz", b"n "):
        # Bits of `context + byte` less those of `context` are those of the byte alone.
        before = ngram_bits(train, context, 2) * 2
        bits = [ngram_bits(train, context + bytes([c]), 2) * 3 - before for c in range(256)]
        assert sum(2.0**-b for b in bits) == pytest.approx(1, rel=1e-9)


def test_random_bytes_cost_eight_bits_and_code_far_less():
    noise = np.random.default_rng(0).bytes(400_000)
    assert ngram_bits(noise[:200_000], noise[200_000:], 0) == pytest.approx(8, abs=0.01)
    # What an order-1 model believes to have seen in noise costs it bits: no smoothing brings it under 8.
    assert 8 < ngram_bits(noise[:200_000], noise[200_000:], 1) < 8.3
    training, held_out = split(source_text(Path(os.__file__).parent / "asyncio"))
    zero, one, two = (ngram_bits(training, held_out, order) for order in range(3))
    assert 1.5 < two < one - 0.3 < zero - 0.6


def test_the_baseline_of_megabytes_takes_seconds():
    noise = np.random.default_rng(0).bytes(4_000_000)
    start = time.process_time()
    ngram_bits(noise, noise[:200_000], 2)
    assert time.process_time() - start < 10


def test_the_baseline_refuses_what_it_cannot_count():
    refused(lambda: ngram_bits(b"", b"x"), "train=0", "train is 0", "split(source_text())")
    refused(lambda: ngram_bits(b"", b"", order=7), "3 problems:", "held_out is 0", "order is 7")
    assert issubclass(DataError, FeatherError)


def test_a_pipe_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    refused(lambda: source_text(tmp_path / "pipe"), "it is a pipe, socket or device", "text.txt")


def test_folders_are_read_through_links_and_once(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a.txt").write_text("linked")
    (tmp_path / "text" / "b.txt").write_text("own")
    (tmp_path / "text" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "text" / "twice").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "text" / "above").symlink_to(tmp_path)
    assert source_text(tmp_path / "text") in (b"linked\nown", b"own\nlinked")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    assert source_text(tmp_path / "link") == b"linked"
