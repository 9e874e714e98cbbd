"""Law: collectives in shared memory give their references' bits, however many are under way, in however many parts."""

import contextlib
import functools as ft
import math
import operator
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, given, settings
from torch import Tensor, fx

from fx_feather import channel as channels
from fx_feather.channel import Channel, connect
from fx_feather.collectives import COLLECTIVES, lockstep
from fx_feather.errors import RankError
from fx_feather.mesh import Mesh
from fx_feather.program import BY_OP
from fx_feather.reuse import held_alone
from fx_feather.shared import Shared, parts
from fx_feather.transport import Peers, bind
from fx_feather.unbuffered import unbuffered

aten = torch.ops.aten

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="ranks share memory on Linux alone")

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


class Groups:
    """Channels by the number of ranks, made again after one has failed: else each later example would fail, too."""

    def __init__(self, stack: contextlib.ExitStack):
        self._stack = stack
        self._made: dict[int, list[Channel]] = {}

    def __getitem__(self, n: int) -> list[Channel]:
        if n not in self._made or any(c._ended for c in self._made[n]):
            self._made[n] = self._stack.enter_context(connected(n))
        return self._made[n]


@pytest.fixture(scope="module")
def groups() -> Iterator[Groups]:
    with contextlib.ExitStack() as stack:
        yield Groups(stack)


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
    group = groups[n]

    def work(rank: int, everyone: Any) -> list[Tensor]:
        place = order.index(rank)
        peers = Peers(order, place, CPU, None, group[rank])
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
    order, dtype = data.draw(st.permutations(range(n))), data.draw(st.sampled_from(DTYPES))
    rows = [n] if name == "reduce_scatter" else []
    values = [[(torch.randn(*rows, s, dtype=torch.float64) * 100).to(dtype) for s in sizes] for _ in range(n)]
    static = {} if name == "psum" else {"dim": 0}
    want = [lockstep(name, list(of_all), Mesh(x=n), "x", **static) for of_all in zip(*values, strict=True)]
    group, before, alone = groups[n], data.draw(st.booleans()), data.draw(st.booleans())

    def work(rank: int, everyone: Any) -> list[Tensor]:
        place = order.index(rank)
        run = bind(name, Peers(order, place, CPU, None, group[rank]), static)
        # Another collective may be under way, so that these are read later than they are given.
        other = bind("psum", Peers(order, place, CPU, None, group[rank]), {}).start(torch.ones(3)) if before else None
        given = [x.clone() for x in values[place]] if alone else list(values[place])
        memory = {x.data_ptr() for x in given if x.numel()}
        wait = run.many.start(given)
        del given
        if other is not None:
            assert other()[0] == n
        got = wait()
        # Results lie where the operands did if nobody else held these.
        over = name == "psum" and alone and held_alone([torch.empty(1)], 0)
        assert not over or memory == {x.data_ptr() for x in got if x.numel()}
        return got

    kept = [[x.clone() for x in of_rank] for of_rank in values]
    for rank, got in enumerate(together(n, work)):
        assert isinstance(got, list), got
        assert all(map(torch.equal, values[rank], kept[rank])), "an operand was written to"
        for x, of_all in zip(got, want, strict=True):
            assert torch.equal(x, of_all[order.index(rank)].view(x.shape))
            assert x.shape[-1:] == (of_all[rank].numel() // (n if name == "all_gather" else 1),)


@pytest.mark.parametrize("n", [2, 3])
@settings(deadline=None)
@given(data=st.data())
def test_a_graph_without_buffers_gives_the_same_bits(n: int, groups: Any, data: st.DataObject) -> None:
    """Graphs that join values, send them and take them apart, of which only some have the form that is rewritten."""
    name = data.draw(st.sampled_from(["psum", "all_gather", "reduce_scatter"]))
    regular = data.draw(st.booleans())
    form = [n] if name == "reduce_scatter" else []
    lead = form if regular else data.draw(st.sampled_from([[], [n], [2], [n, 1], [1]]))
    sizes = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=3))
    dtypes = [torch.float64 if regular else data.draw(st.sampled_from(DTYPES[:2])) for _ in sizes]
    along = len(lead) if regular else data.draw(st.integers(0, len(lead)))
    shapes = [[*lead[:along], s, *lead[along:]] for s in sizes]
    static = {} if name == "psum" else {"dim": 0}
    values = [[torch.randn(s).to(d) for s, d in zip(shapes, dtypes, strict=True)] for _ in range(n)]
    joined = torch.cat(values[0], along)
    assume(name != "reduce_scatter" or joined.shape[0] % n == 0)
    result = COLLECTIVES[name].reference([torch.cat(v, along) for v in values], **static)[0]
    views = [[-1], [n, -1] if result.numel() % n == 0 and result.numel() else [-1], list(result.shape), None]
    usual = {"psum": None, "all_gather": views[1], "reduce_scatter": [-1]}
    view = usual[name] if regular else data.draw(st.sampled_from(views))
    source = result if view is None else result.view(view)
    cut = source.ndim - 1 if regular else data.draw(st.integers(0, source.ndim - 1))
    total = source.shape[cut]
    split = sizes if sum(sizes) == total else [total]

    def graph(run: Any) -> fx.Graph:
        g = fx.Graph()
        xs = [g.placeholder(f"x{i}") for i in range(len(sizes))]
        for x, v in zip(xs, values[0], strict=True):
            x.meta["val"] = v
        nodes = [(aten.cat.default, (xs, along), joined), (run, (), result)]
        if view is not None:
            nodes.append((aten.view.default, (view,), source))
        nodes.append((aten.split_with_sizes.default, (split, cut), source.split(split, cut)))
        last: Any = None
        for target, args, val in nodes:
            last = g.call_function(target, args if last is None else (last, *args))
            last.meta["val"] = val
        g.output([g.call_function(operator.getitem, (last, i)) for i in range(len(split))])
        return g

    group = groups[n]

    def work(rank: int, everyone: Any) -> tuple[list[Tensor], list[Tensor]]:
        run = bind(name, Peers(list(range(n)), rank, CPU, None, group[rank]), static)
        plain, rewritten = graph(run), graph(run)
        unbuffered(rewritten)
        return tuple(list(fx.GraphModule({}, g)(*values[rank])) for g in (plain, rewritten))

    for got in together(n, work):
        assert isinstance(got, tuple), got
        for a, b in zip(*got, strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b)


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


def test_signals_do_not_make_a_rank_wait_longer() -> None:
    """Those of a profiler, say: each would start a limit of the system anew."""
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
    try:
        with connected(2, timeout_s=0.3) as group:
            started = time.monotonic()
            with pytest.raises(RuntimeError, match="Timed out"):
                psum(group[0], 0, 2, torch.ones(4))
            assert time.monotonic() - started < 5
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("room", range(6))
def test_without_room_for_files_all_ranks_do_without(room: int) -> None:
    """Rank 1 may open so many more."""

    def work(rank: int, everyone: Any) -> Channel | None:
        return connect(range(2), rank, everyone, 1)

    # Both ranks are threads of this process, so rank 0's files count as well.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(p.name) for p in Path("/proc/self/fd").iterdir())
    taken = len(list(Path("/proc/self/fd").iterdir())) - 1
    fill = [os.open("/dev/null", os.O_RDONLY) for _ in range(highest + 1 - taken)]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + room, hard))
        found = together(2, work)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for f in fill:
            os.close(f)
    assert found == [None, None]


def test_a_channel_that_failed_says_so_again_at_once() -> None:
    with connected(2, timeout_s=0.25) as group:
        for text in ("Timed out", "Connection closed: an earlier collective failed with RuntimeError: Timed out"):
            started = time.monotonic()
            with pytest.raises(RuntimeError, match=text):
                psum(group[0], 0, 2, torch.ones(4))
        assert time.monotonic() - started < 0.2


def test_an_interrupt_ends_the_channel() -> None:
    """To go on would be to wait for messages that were read already."""
    with connected(2) as group:

        def interrupted(*values: Tensor, out: Tensor) -> Tensor:
            raise KeyboardInterrupt

        interrupted.__name__ = "add"

        def work(rank: int, everyone: Any) -> Any:
            try:
                return Shared(group[rank], [0, 1]).all_reduce(torch.ones(4), interrupted if rank else torch.add)()
            except KeyboardInterrupt:
                return "interrupted"

        together(2, work)
        ended = together(2, lambda rank, everyone: psum(group[rank], rank, 2, torch.ones(4)))
    assert all(isinstance(e, RuntimeError) and "Connection closed" in str(e) for e in ended)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_does_not_hide_the_end_of_a_rank() -> None:
    with connected(2) as group:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            # Only what must be done: threads and pytest are not this process's.
            os.close(write)
            os.read(read, 1)
            os._exit(0)
        try:
            group[1].close()
            started = time.monotonic()
            with pytest.raises(RuntimeError, match="Connection closed by peer: rank 1"):
                psum(group[0], 0, 2, torch.ones(4))
            assert time.monotonic() - started < 5
        finally:
            os.close(write)
            os.waitpid(child, 0)
            os.close(read)


@pytest.mark.parametrize("why", ["asked", "other machine", "no such call"])
def test_without_shared_memory_all_ranks_do_without(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if why == "asked":
        monkeypatch.setenv("FX_FEATHER_SHARED_MEMORY", "0")
    if why == "no such call":
        monkeypatch.delattr("os.memfd_create")

    def work(rank: int, everyone: Any) -> Channel | None:
        def heard(x: Any) -> list[Any]:
            # A path that is no socket here, as if it were that of a rank elsewhere.
            return [p.rstrip(b"\0") + b"-elsewhere" if p.startswith(b"/") else p for p in everyone(x)]

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
