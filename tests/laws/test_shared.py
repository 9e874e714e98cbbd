"""Law: collectives in shared memory give their references' bits, however many are under way, in however many parts."""

import contextlib
import functools as ft
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from fx_feather import channel as channels
from fx_feather.channel import Channel, connect
from fx_feather.collectives import COLLECTIVES, lockstep
from fx_feather.errors import RankError
from fx_feather.mesh import Mesh
from fx_feather.program import BY_OP
from fx_feather.shared import Shared, parts
from fx_feather.transport import Peers, bind

NAMES = sorted(c.name for c in BY_OP.values() if c.communicates)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64)
CPU = torch.device("cpu")


def together(n: int, work: Callable[[int, Callable[[Any], list[Any]]], Any]) -> list[Any]:
    """What `work(rank, everyone)` gives in a thread for each rank; `everyone` gathers an object of each."""
    barrier = threading.Barrier(n, timeout=30)
    said: list[Any] = [None] * n
    out: list[Any] = [None] * n

    def everyone(rank: int, x: Any) -> list[Any]:
        said[rank] = x
        barrier.wait()
        heard = list(said)
        barrier.wait()
        return heard

    def run(rank: int) -> None:
        try:
            out[rank] = work(rank, ft.partial(everyone, rank))
        except Exception as e:
            out[rank] = e

    threads = [threading.Thread(target=run, args=(r,)) for r in range(n)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return out


@contextlib.contextmanager
def connected(n: int, place_bytes: int = 256, timeout_s: float = 30) -> Iterator[list[Channel]]:
    """Channels of a group whose ranks are threads; places so small that most values take several rounds."""
    with mock.patch.object(channels, "PLACE_BYTES", place_bytes):
        made = together(n, lambda r, everyone: connect(range(n), r, everyone, timeout_s))
    try:
        assert all(isinstance(c, Channel) for c in made), made
        yield made
    finally:
        for c in made:
            if isinstance(c, Channel):
                c.close()


@pytest.fixture(scope="module")
def groups() -> Iterator[dict[int, list[Channel]]]:
    with contextlib.ExitStack() as stack:
        yield {n: stack.enter_context(connected(n)) for n in (2, 3, 4)}


@dataclass(frozen=True)
class Call:
    """One collective: its name, static arguments, operands of all ranks, and how they lie in memory."""

    name: str
    static: dict[str, Any]
    values: list[Tensor]
    strided: bool
    in_place: bool


@st.composite
def calls(draw: st.DrawFn, n: int) -> Call:
    name = draw(st.sampled_from(NAMES))
    c = COLLECTIVES[name]
    shape = draw(st.lists(st.integers(0, 7), min_size=int("dim" in " ".join(c.static)), max_size=3))
    static: dict[str, Any] = {}
    for key in c.static:
        if key == "perm":
            to = draw(st.permutations(range(n)))[: draw(st.integers(0, n))]
            static[key] = [r for pair in enumerate(to) for r in pair]
        else:
            static[key] = draw(st.integers(0, len(shape) - 1))
    if c.divides is not None:
        shape[static[c.divides]] *= n
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    dtype = draw(st.sampled_from(DTYPES))
    values = [(torch.randn(shape, generator=g, dtype=torch.float64) * 100).to(dtype) for _ in range(n)]
    return Call(name, static, values, draw(st.booleans()), draw(st.booleans()))


def laid(x: Tensor, strided: bool) -> Tensor:
    """A copy of a value, with gaps in memory if asked for."""
    return x.repeat_interleave(2, -1)[..., ::2] if strided and x.ndim else x.clone()


@pytest.mark.parametrize("n", [2, 3, 4])
@settings(deadline=None)
@given(data=st.data())
def test_equals_the_reference(n: int, groups: Any, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(n)))
    todo = data.draw(st.lists(calls(n), min_size=1, max_size=4))
    # Where each wait comes: after how many starts, and in which order.
    waits = data.draw(st.permutations([*range(len(todo)), *range(len(todo))]))
    mesh = Mesh(x=n)
    want = [lockstep(c.name, c.values, mesh, "x", **c.static) for c in todo]

    def work(rank: int, everyone: Any) -> list[Tensor]:
        place = order.index(rank)
        peers = Peers(order, place, CPU, None, groups[n][rank])
        under_way: dict[int, Callable[[], Tensor]] = {}
        out: dict[int, Tensor] = {}
        for k in waits:
            if k in under_way:
                out[k] = under_way.pop(k)()
                continue
            c = todo[k]
            run = bind(c.name, peers, c.static)
            run = run.in_place if c.in_place and hasattr(run, "in_place") else run
            under_way[k] = run.start(laid(c.values[place], c.strided))
        return [out[k] for k in range(len(todo))]

    for rank, got in enumerate(together(n, work)):
        assert isinstance(got, list), got
        for k, x in enumerate(got):
            assert x.is_contiguous()
            assert torch.equal(x, want[k][order.index(rank)]), f"{todo[k].name} {todo[k].static} on rank {rank}"


@pytest.mark.parametrize("n", [2, 3, 4])
@settings(deadline=None)
@given(data=st.data())
def test_many_equal_one_after_another(n: int, groups: Any, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["psum", "all_gather", "reduce_scatter"]))
    sizes = data.draw(st.lists(st.integers(0, 90), min_size=1, max_size=6))
    rows = [n] if name == "reduce_scatter" else []
    values = [[torch.randn(*rows, s, dtype=torch.float64) for s in sizes] for _ in range(n)]
    static = {} if name == "psum" else {"dim": 0}
    want = [lockstep(name, list(of_all), Mesh(x=n), "x", **static) for of_all in zip(*values, strict=True)]

    def work(rank: int, everyone: Any) -> list[Tensor]:
        run = bind(name, Peers(list(range(n)), rank, CPU, None, groups[n][rank]), static)
        return run.many(list(values[rank]))

    for rank, got in enumerate(together(n, work)):
        assert isinstance(got, list), got
        for x, of_all in zip(got, want, strict=True):
            assert torch.equal(x, of_all[rank].view(x.shape))
            assert x.shape[-1:] == (of_all[rank].numel() // (n if name == "all_gather" else 1),)


@settings(deadline=None)
@given(shape=st.lists(st.integers(0, 6), max_size=4), most=st.integers(1, 40))
def test_parts_are_all_of_a_tensor_once(shape: list[int], most: int) -> None:
    seen = torch.zeros(shape, dtype=torch.int64)
    for at in parts(shape, most):
        assert seen[at].numel() <= most
        seen[at] += 1
    assert (seen == 1).all()


def psum(c: Channel, rank: int, n: int, x: Tensor) -> Tensor:
    return bind("psum", Peers(list(range(n)), rank, CPU, None, c), {})(x)


def test_a_rank_that_ends_is_noticed_at_once_by_all() -> None:
    with connected(3) as group:

        def work(rank: int, everyone: Any) -> Tensor | None:
            return group[rank].close() if rank == 2 else psum(group[rank], rank, 3, torch.ones(4))

        ended = together(3, work)
    assert ended[2] is None
    for e in ended[:2]:
        assert isinstance(e, RuntimeError) and "Connection closed by peer: rank" in str(e)


def test_a_rank_that_does_not_come_is_waited_for_as_long_as_asked() -> None:
    with (
        connected(2, timeout_s=0.25) as group,
        pytest.raises(RuntimeError, match="Timed out waiting for rank 1 in shared memory"),
    ):
        psum(group[0], 0, 2, torch.ones(4))


@pytest.mark.parametrize(
    ("name", "x"), [("psum", torch.ones(5)), ("psum", torch.ones(4, dtype=torch.float64)), ("pmax", torch.ones(4))]
)
def test_ranks_that_disagree_are_told_so(name: str, x: Tensor) -> None:
    with connected(2) as group:

        def work(rank: int, everyone: Any) -> Tensor:
            run = bind(name if rank else "psum", Peers([0, 1], rank, CPU, None, group[rank]), {})
            return run(x if rank else torch.ones(4))

        ended = together(2, work)
    first = next(e for e in ended if isinstance(e, RankError))
    assert all(part in str(first) for part in ("got:", "problem:", "rule:", "fix:"))
    # Who is told first closes its end; the other may only learn of that.
    assert all(isinstance(e, RuntimeError) for e in ended)


def test_a_rank_that_fails_in_between_stops_the_others() -> None:
    @ft.wraps(torch.add)
    def broken(*values: Tensor, out: Tensor) -> Tensor:
        raise MemoryError

    with connected(2) as group:

        def work(rank: int, everyone: Any) -> Tensor:
            reduce = broken if rank else torch.add
            return Shared(group[rank], [0, 1]).all_reduce(torch.ones(4000), reduce)()

        ended = together(2, work)
    assert isinstance(ended[1], MemoryError)
    assert isinstance(ended[0], RuntimeError)


@pytest.mark.parametrize("why", ["asked", "other machine", "no such call"])
def test_without_shared_memory_all_ranks_do_without(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if why == "asked":
        monkeypatch.setenv("FX_FEATHER_SHARED_MEMORY", "0")
    if why == "no such call":
        monkeypatch.delattr("os.memfd_create")

    def work(rank: int, everyone: Any) -> Channel | None:
        def heard(x: Any) -> list[Any]:
            # A path that is no socket here, as if it were that of a rank elsewhere.
            return [f"{p}-elsewhere" if isinstance(p, str) else p for p in everyone(x)]

        return connect(range(3), rank, heard if why == "other machine" else everyone, 1)

    assert together(3, work) == [None] * 3


def test_places_are_not_overwritten_before_all_have_read_them() -> None:
    """A fast rank and a slow one, for many rounds: each reads what the other wrote for that round."""
    rounds, n = 200, 3
    with connected(n, place_bytes=64) as group:

        def work(rank: int, everyone: Any) -> list[float]:
            out = []
            for k in range(rounds):
                if rank == k % n:
                    math.factorial(2000)
                out.append(psum(group[rank], rank, n, torch.full((3,), float(k * (rank + 1))))[0].item())
            return out

        assert together(n, work) == [[float(6 * k) for k in range(rounds)]] * n
