"""Ranks that disagree, each a thread of this process: all say the same, naming what differs and on which rank."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fx_feather as ff
from fx_feather import agreement
from fx_feather.agreement import Everyone, Leaf, check_leaves, check_numbers, check_programs
from fx_feather.errors import RankError
from fx_feather.spec import Type, shard

PARTS = ("got:", "problem:", "rule:", "fix:")


def on_ranks(n: int, work: Callable[[int, Everyone], Any]) -> list[Any]:
    """What each rank found, or the error that it raised; ranks give each other bytes, as many on all."""
    brought: list[bytes] = [b""] * n
    barrier = threading.Barrier(n, timeout=20)
    found: list[Any] = [None] * n

    def run(rank: int) -> None:
        def everyone(data: bytes) -> list[bytes]:
            brought[rank] = data
            barrier.wait()
            out = list(brought)
            barrier.wait()
            assert len({len(x) for x in out}) == 1, "bytes of one length"
            return out

        try:
            found[rank] = work(rank, everyone)
        except Exception as e:
            found[rank] = e

    threads = [threading.Thread(target=run, args=(r,)) for r in range(n)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return found


def said(found: list[Any]) -> str:
    """The one message of all ranks, "" if none of them complains."""
    assert all(isinstance(x, RankError) for x in found) or not any(isinstance(x, Exception) for x in found), found
    texts = {str(x) if isinstance(x, Exception) else "" for x in found}
    assert len(texts) == 1, "all ranks say the same"
    text = texts.pop()
    assert not text or all(part in text for part in PARTS), text
    return text


BASE = [f"%{i} = call_{i}(%{i - 1})" for i in range(300)]


def lines(at: int | None = None, text: str = "%x = other()", end: int = 300) -> str:
    return "\n".join(text if i == at else line for i, line in enumerate(BASE[:end]))


#: The programs of the ranks, and what is said.
PROGRAMS: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "equal": ([lines()] * 3, ()),
    "one line": (
        [lines(), lines(7), lines()],
        ("2 different programs; rank 1 has another than rank 0; line 8", "rank 1: %x = other()"),
    ),
    "the first line": ([lines(0), lines(), lines()], ("rank 0 has another than rank 1; line 1 ",)),
    "the last line": ([lines(), lines(), lines(299)], ("rank 2 has another", "line 300")),
    "a shorter one": ([lines(), lines(end=100)], ("line 101", "rank 1: (it ends here)")),
    "a longer one": ([lines(end=10), lines(end=10), lines()], ("line 11", "rank 0: (it ends here)", "rank 2: %10")),
    "all differ": (
        [lines(5), lines(6), lines(7)],
        ("3 different programs", "ranks 1, 2 have another than rank 0; line 6"),
    ),
    "a constant": (
        [lines(9, f"%9 = {c}") for c in ("constant f32[4] sha256 a", "constant f32[4] sha256 b")],
        ("line 10", "sha256 a", "sha256 b"),
    ),
    "long lines": ([lines(3, "é" * 500), lines()], ("line 4",)),
    "an empty one": (["", lines()], ("line 1 ", "rank 0: (it ends here)")),
    "many ranks": (
        [lines(5) if r in (3, 11) else lines() for r in range(16)],
        ("ranks 3, 11 have another than rank 0",),
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str) -> None:
    texts, words = PROGRAMS[name]
    mesh = ff.Mesh(dp=len(texts))
    text = said(on_ranks(len(texts), lambda r, everyone: check_programs(texts[r], mesh, everyone)))
    assert bool(text) == bool(words)
    for word in words:
        assert word in text, text


NUMBERS: dict[str, tuple[list[tuple[int, int | None]], tuple[str, ...]]] = {
    "equal": ([(3, 0)] * 3, ()),
    "no seed": ([(3, None)] * 3, ()),
    "a step skipped": (
        [(3, 0), (2, 0), (3, 0)],
        ("step 3 on rank 0\n", "step 2 on rank 1", "rank 1 differs in the step", "none may skip one"),
    ),
    "a step skipped on many": ([(3, 0), (2, 0), (2, 0)], ("rank 0 differs in the step",)),
    "all at others": ([(3, 0), (2, 0), (1, 0)], ("ranks 1, 2 differ in the step",)),
    "another seed": ([(0, 0), (0, 1)], ("rank 1 differs in the seed", "step.init(seed=0)")),
    "a seed not known": ([(0, 0), (0, None), (0, 0)], ("seed None on rank 1", "rank 1 differs in the seed")),
    "a large seed": ([(0, 2**62 - 1), (0, 2**62 - 2)], ("differs in the seed",)),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers(name: str) -> None:
    given, words = NUMBERS[name]
    n = len(given)
    text = said(
        on_ranks(
            n,
            lambda r, everyone: check_numbers(
                "step", dict(zip(("step", "seed"), given[r], strict=True)), range(n), everyone
            ),
        )
    )
    assert bool(text) == bool(words)
    for word in words:
        assert word in text, text


MESH = ff.Mesh(dp=2, tp=2)
F, INT = torch.float32, torch.int64


def nudge(x: torch.Tensor) -> torch.Tensor:
    """Another value in the last place alone."""
    out = x.clone()
    out.view(-1)[-1] += 1
    return out


#: Type of a leaf, its path, the ranks that hold another, and what is said.
LEAVES: dict[str, tuple[Type, str, dict[int, Callable[[torch.Tensor], torch.Tensor]], tuple[str, ...]]] = {
    "whole, equal": (Type(F, (4, 4), ((), ())), "params['w']", {}, ()),
    "whole": (
        Type(F, (4, 4), ((), ())),
        "params['w']",
        {3: nudge},
        ("params['w'], f32[4, 4]: rank 3 not as rank 0", "1 of 2 leaves"),
    ),
    "whole, on rank 0": (Type(F, (4, 4), ((), ())), "params['w']", {0: nudge}, ("rank 0 not as rank 1",)),
    "whole, on two": (Type(F, (4, 4), ((), ())), "params['w']", {2: nudge, 3: nudge}, ("ranks 2, 3 not as rank 0",)),
    "a number": (
        Type(INT, (), ()),
        "state.opt['step']",
        {1: nudge},
        ("state.opt['step'], i64[]: rank 1 not as rank 0",),
    ),
    "split over dp, equal": (Type(F, (4, 4), (("dp",), ())), "params['w']", {}, ()),
    "split over dp": (
        Type(F, (4, 4), (("dp",), ())),
        "params['w']",
        {1: nudge},
        ("f32[4@dp, 4]: rank 1 not as rank 0",),
    ),
    "split over dp, below": (Type(F, (4, 4), (("dp",), ())), "params['w']", {3: nudge}, ("rank 3 not as rank 2",)),
    "split over tp": (Type(F, (4, 4), ((), ("tp",))), "params['w']", {2: nudge}, ("rank 2 not as rank 0",)),
    "split over tp, both rows": (
        Type(F, (4, 4), ((), ("tp",))),
        "params['w']",
        {2: nudge, 3: nudge},
        ("rank 2 not", "rank 3 not as rank 1"),
    ),
    # What every rank holds a part of for itself has no other to be compared with.
    "split over both": (Type(F, (4, 4), (("dp",), ("tp",))), "params['w']", {1: nudge}, ()),
    "split over both in one dim": (Type(F, (4, 4), (("dp", "tp"), ())), "params['w']", {1: nudge}, ()),
    "uneven": (Type(F, (5, 4), (("dp",), ())), "params['w']", {1: nudge}, ("f32[5@dp, 4]: rank 1 not as rank 0",)),
    "a batch": (
        Type(INT, (4, 4), (("dp",), ())),
        "batch['tokens']",
        {3: nudge},
        ("batch['tokens'], i64[4@dp, 4]: rank 3 not as rank 2", "step.from_local(rows)"),
    ),
    "a sign of zero": (
        Type(F, (4,), ((),)),
        "params['w']",
        {1: lambda x: x * 0 * -1, 0: lambda x: x * 0, 2: lambda x: x * 0, 3: lambda x: x * 0},
        ("rank 1 not as rank 0",),
    ),
    "half precision": (Type(torch.bfloat16, (4, 4), ((), ())), "params['w']", {2: nudge}, ("bf16[4, 4]: rank 2",)),
    "bools": (Type(torch.bool, (4,), ((),)), "batch['mask']", {1: lambda x: ~x}, ("rank 1 not as rank 0",)),
    "empty": (Type(F, (0, 4), ((), ())), "params['w']", {}, ()),
    "swapped rows": (Type(F, (4, 4), ((), ())), "batch['x']", {1: lambda x: x.flip(0)}, ("rank 1 not as rank 0",)),
    "transposed": (Type(F, (4, 4), ((), ())), "params['w']", {1: lambda x: x.T}, ("rank 1 not as rank 0",)),
    "strided, equal": (Type(F, (4, 4), ((), ())), "params['w']", {1: lambda x: x.T.contiguous().T}, ()),
    "NaN where others have a number": (
        Type(F, (4,), ((),)),
        "params['w']",
        {1: lambda x: x / 0},
        ("rank 1 not as rank 0",),
    ),
}


def compared(name: str) -> list[Any]:
    t, path, others, _ = LEAVES[name]
    whole = (torch.arange(max(1, t.shape[0] if t.shape else 1) * 4.0) + 1)[: max(1, torch.Size(t.shape).numel())]
    whole = whole[: torch.Size(t.shape).numel()].reshape(t.shape).to(t.dtype)

    def work(r: int, everyone: Everyone) -> list[str]:
        part = shard(whole, t, MESH, r)
        same = Leaf("params['same']", torch.ones(3), Type(F, (3,), ((),)))
        return check_leaves(
            "step(state, batch)", [same, Leaf(path, others.get(r, lambda x: x)(part), t)], MESH, everyone
        )

    return on_ranks(4, work)


@pytest.mark.parametrize("name", LEAVES)
def test_leaves(name: str) -> None:
    words = LEAVES[name][3]
    text = said(compared(name))
    assert bool(text) == bool(words)
    for word in words:
        assert word in text, text


def test_what_is_not_finite_on_one_rank_is_known_to_all() -> None:
    t = Type(F, (4, 4), (("dp",), ("tp",)))

    def work(r: int, everyone: Everyone) -> list[str]:
        x = torch.full((2, 2), float("nan") if r == 2 else 1.0)
        return check_leaves(
            "step", [Leaf("params['w']", x, t), Leaf("params['v']", torch.ones(2, 2), t)], MESH, everyone
        )

    assert on_ranks(4, work) == [["params['w']"]] * 4


def test_many_leaves_are_one_message() -> None:
    t = Type(F, (2,), ((),))

    def work(r: int, everyone: Everyone) -> list[str]:
        return check_leaves(
            "step", [Leaf(f"params[{i}]", torch.full((2,), float(r)), t) for i in range(70)], MESH, everyone
        )

    text = said(on_ranks(4, work))
    assert "70 of 70 leaves" in text and "and 62 more" in text and len(text.splitlines()) < 16


def test_a_large_leaf_is_looked_at_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "_WHOLE", 64)
    x = torch.arange(1000.0)
    assert agreement.digest(x) == agreement.digest(x.clone()) != agreement.digest(x + 1)


@pytest.mark.parametrize(
    "numbers", [[(0, 0)] * 4, [(1, 0), (0, 0)], [(2, 0), (1, 0), (3, 0)], [(1, 0), (1, 1)], [(1, None), (1, 0)]]
)
def test_tokens_are_compared_by_their_sums(numbers: list[tuple[int, int | None]]) -> None:
    tokens = [agreement.token(*x) for x in numbers]
    assert agreement.is_shared(len(tokens), sum(tokens), sum(t * t for t in tokens)) == (len(set(numbers)) == 1)


#: Mistakes in what compares, each with a case that then passes without a word.
PLANTED: dict[str, tuple[str, Any, Callable[[], list[Any]]]] = {
    "nothing of a leaf is hashed": ("digest", lambda x: 0, lambda: compared("whole")),
    "only a sum is": ("digest", lambda x: int(x.sum()), lambda: compared("swapped rows")),
    "only the first element is": ("digest", lambda x: int(x.reshape(-1)[0]), lambda: compared("split over dp, below")),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mistake_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, instead, case = PLANTED[name]
    assert said(case())
    monkeypatch.setattr(agreement, function, instead)
    assert not said(case())
