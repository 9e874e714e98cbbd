"""Channels: memory that ranks on one machine share, and how they tell each other what is there to be read."""

import collections
import contextlib
import math
import mmap
import os
import select
import socket
import struct
import tempfile
import weakref
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from .errors import RankError, fail

#: Bytes that a rank shows to the others at a time; in each group it has two such places.
PLACE_BYTES = 2 << 20
#: Shapes of places that are kept made.
_MANY_VIEWS = 4096
#: Bytes in which a rank says where it can be reached: what a path of a socket holds at most, and some.
_PATH_BYTES = 112

T = TypeVar("T")
#: One rank's part in a collective. At each `yield` it has shown something; it goes on once all others have, too.
Rounds = Generator[None, None, T]


class Channel:
    """Memory that a group of ranks shares, and sockets by which they say that there is something to read.

    In round `k` a rank writes to its place `k % 2`, tells the others so, waits until each of them has told it the
    same, and reads what they wrote. Who hears of round `k + 1` knows that the sender has read round `k`; so a place is
    written again only after all have read it, and no other messages are needed. A message says which collective it
    belongs to. A rank that fails or ends closes its sockets, which the others notice as soon as they wait for it.

    Nothing moves but in `start` and in what it gives, which one thread calls. A collective that is started while
    another is under way begins when that one has ended, and reads its operand only then. The order is that of the
    starts, the same on all ranks.

    Args:
        ranks: of the world, which messages name; in the order of the group, as all that follows.
        index: of this rank in the group.
        memories: of each rank.
        sockets: to each other rank.
        timeout_s: how long to wait for another rank, in seconds.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        index: int,
        memories: Sequence[mmap.mmap],
        sockets: dict[int, socket.socket],
        timeout_s: float,
    ) -> None:
        self.index = index
        self._ranks = list(ranks)
        self.place_bytes = len(memories[0]) // 2
        self._bytes = [torch.frombuffer(m, dtype=torch.uint8) for m in memories]
        self._sockets = sockets
        self._limit_ms = min(1e3 * timeout_s, 2.0**31 - 1)  # what poll takes
        self._polls = {k: select.poll() for k in sockets}
        for k, s in sockets.items():
            s.setblocking(False)
            self._polls[k].register(s, select.POLLIN)
        self._under_way: collections.deque[_Call[Any]] = collections.deque()
        self._round = 0
        self._message = b""
        self._views: dict[Any, tuple[list[Tensor], int]] = {}
        self._ended: str | None = None
        _open.add(self)

    def __len__(self) -> int:
        return len(self._bytes)

    def places(self, what: str, shape: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        """The places of a new round, that of each rank, as tensors of one shape and dtype."""
        self._round += 1
        key = what, tuple(shape), dtype, self._round % 2
        if key not in self._views:
            if len(self._views) >= _MANY_VIEWS:
                self._views.clear()
            self._views[key] = self._view(*key)
        views, tag = self._views[key]
        self._message = struct.pack("=QI", self._round, tag)
        return views

    def _view(self, what: str, shape: tuple[int, ...], dtype: torch.dtype, place: int) -> tuple[list[Tensor], int]:
        at, size = place * self.place_bytes, math.prod(shape) * dtype.itemsize
        views = [x[at : at + size].view(dtype).view(shape) for x in self._bytes]
        return views, zlib.crc32(repr((what, shape, dtype)).encode())

    def start(self, rounds: Rounds[T]) -> Callable[[], T]:
        """Begins a collective; gives what waits for its result.

        Raises:
            RuntimeError: another rank failed, now or earlier, or did not come in time.
            RankError: another rank runs another collective.
        """
        call = _Call(rounds)
        with self._all_or_nothing():
            self._under_way.append(call)
            if len(self._under_way) == 1:
                self._show()

        def wait() -> T:
            with self._all_or_nothing():
                while call.result is None:
                    self._hear()
                    self._show()
            return call.result

        return wait

    @contextlib.contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Ends the channel at any error, also an interrupt: the others wait for what will not come."""
        if self._ended is not None:
            raise RuntimeError(f"Connection closed: {self._ended}")
        try:
            yield
        except BaseException as e:
            self.close(
                f"an earlier collective failed with {type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"
            )
            raise

    def _show(self) -> None:
        """Goes on with what is under way to the next place that is to be shown, and tells the others."""
        while self._under_way:
            call = self._under_way[0]
            try:
                next(call.rounds)
            except StopIteration as end:
                call.result = end.value
                self._under_way.popleft()
                continue
            for k, s in self._sockets.items():
                try:
                    s.send(self._message)
                except OSError as e:
                    self._lost(k, e)
            return

    def _hear(self) -> None:
        """Waits until all others have shown what belongs to this round."""
        for k, s in self._sockets.items():
            try:
                heard = self._receive(k, s)
            except OSError as e:
                self._lost(k, e)
            if heard != self._message:
                if len(heard) < len(self._message):
                    self._lost(k, None)
                fail(
                    RankError,
                    call=f"a collective of ranks {self._ranks} in shared memory",
                    got="rank {} in round {}, collective {:08x}".format(self._ranks[k], *struct.unpack("=QI", heard)),
                    number="this rank is in round {}, collective {:08x}".format(*struct.unpack("=QI", self._message)),
                    rule="all ranks of a group run the same collectives, on values of the same shapes and dtypes",
                    fix="run the same steps and calls on all ranks, in the same order",
                )

    def _receive(self, k: int, s: socket.socket) -> bytes:
        try:
            return s.recv(len(self._message))
        except BlockingIOError:
            # Not by a limit of the socket itself: each signal would start that anew.
            if not self._polls[k].poll(self._limit_ms):
                raise TimeoutError from None
            return s.recv(len(self._message))

    def _lost(self, k: int, error: OSError | None) -> None:
        if isinstance(error, TimeoutError):
            raise RuntimeError(f"Timed out waiting for rank {self._ranks[k]} in shared memory") from error
        raise RuntimeError(f"Connection closed by peer: rank {self._ranks[k]}, in shared memory") from error

    def close(self, why: str = "this rank has closed it") -> None:
        """Ends the channel: whoever waits for this rank fails, at once."""
        if self._ended is None:
            self._ended = why
            self._under_way.clear()
            for s in self._sockets.values():
                # A process that was forked may hold the socket too.
                with contextlib.suppress(OSError):
                    s.shutdown(socket.SHUT_RDWR)
                s.close()

    def forget(self) -> None:
        """Lets go of the sockets in a process that was forked, so that the end of the rank itself is noticed."""
        self._ended = "this process was forked from a rank"
        for s in self._sockets.values():
            s.close()


class _Call(Generic[T]):
    def __init__(self, rounds: Rounds[T]):
        self.rounds = rounds
        self.result: T | None = None


#: All channels of this process.
_open: "weakref.WeakSet[Channel]" = weakref.WeakSet()


def _forget_all() -> None:
    for channel in list(_open):
        channel.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)


def connect(
    ranks: Sequence[int], index: int, everyone: Callable[[bytes], list[bytes]], timeout_s: float
) -> Channel | None:
    """Makes a channel between the ranks of a group; every rank calls it.

    Args:
        ranks: of the world, in the order of the group.
        index: of this rank in the group.
        everyone: gives all ranks the bytes that each of them brought, as many on all, in their order.
        timeout_s: how long to wait for another rank, here and in a collective, in seconds.

    Returns:
        None, on all ranks, unless all of them run on one Linux machine and reach each other there, or if one has
        FX_FEATHER_SHARED_MEMORY=0 in its environment.
    """
    with contextlib.ExitStack() as stack:
        door = stack.enter_context(_door(timeout_s))
        own_path = b"" if door is None else os.fsencode(door.getsockname())
        paths = [x.rstrip(b"\0") for x in everyone(own_path.ljust(_PATH_BYTES, b"\0"))]
        if door is None or b"" in paths:
            return None

        def all_fine() -> bool:
            return all(x == b"\1" for x in everyone(b"\1" if fine else b"\0"))

        sockets: dict[int, socket.socket] = {}
        opened = stack.enter_context(contextlib.ExitStack())
        memories: dict[int, mmap.mmap] = {}
        own, fine = -1, False
        with contextlib.suppress(OSError):
            own = os.memfd_create("fx_feather")
            stack.callback(os.close, own)
            os.truncate(own, 2 * PLACE_BYTES)
            memories[index] = mmap.mmap(own, 2 * PLACE_BYTES)
            for k in range(index):
                sockets[k] = s = opened.enter_context(socket.socket(socket.AF_UNIX))
                s.settimeout(timeout_s)
                s.connect(paths[k])
                _send_memory(s, index, own)
            fine = True
        if not all_fine():
            return None
        fine = False
        with contextlib.suppress(OSError, struct.error):
            for _ in range(index + 1, len(paths)):
                s = opened.enter_context(door.accept()[0])
                s.settimeout(timeout_s)
                k, memory = _receive_memory(s)
                sockets[k], memories[k] = s, memory
                _send_memory(s, index, own)
            for k in range(index):
                _, memories[k] = _receive_memory(sockets[k])
            fine = True
        if not fine:
            opened.close()  # so that the others wait no longer
        if not all_fine():
            return None
        opened.pop_all()
    order = range(len(paths))
    others = {k: sockets[k] for k in order if k != index}
    return Channel(ranks, index, [memories[k] for k in order], others, timeout_s)


@contextlib.contextmanager
def _door(timeout_s: float) -> Iterator[socket.socket | None]:
    """A socket that this user's other processes can call while it is there; None where there is no such thing."""
    door = None
    with contextlib.ExitStack() as stack:
        if os.environ.get("FX_FEATHER_SHARED_MEMORY") != "0" and hasattr(os, "memfd_create"):
            # No folder for it, a path that is too long, a file system without sockets, too many open files.
            with contextlib.suppress(OSError):
                folder = tempfile.mkdtemp()
                stack.callback(_remove, folder)
                made = stack.enter_context(socket.socket(socket.AF_UNIX))
                made.settimeout(timeout_s)
                made.bind(os.path.join(folder, "door"))
                made.listen(1024)
                door = made
        yield door


def _remove(folder: str) -> None:
    # Not by what lists the folder first: that would open a file, of which there may be too many.
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(folder, "door"))
    with contextlib.suppress(OSError):
        os.rmdir(folder)


def _send_memory(s: socket.socket, index: int, memory: int) -> None:
    socket.send_fds(s, [struct.pack("=I", index)], [memory])


def _receive_memory(s: socket.socket) -> tuple[int, mmap.mmap]:
    text, memories, _, _ = socket.recv_fds(s, 4, 1)
    if not memories:
        raise ConnectionResetError("a rank ended")
    try:
        return struct.unpack("=I", text)[0], mmap.mmap(memories[0], 2 * PLACE_BYTES)
    finally:
        os.close(memories[0])
