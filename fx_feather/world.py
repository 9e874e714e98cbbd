"""The world of a process: how it begins and ends, and what is said when another rank is lost."""

import atexit
import contextlib
import datetime
import functools as ft
import hashlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from .errors import FeatherError, MeshError, RankError, fail, message
from .watch import Watch, end_process

#: Seconds that a rank waits for the others in a collective; the environment variable FX_FEATHER_TIMEOUT sets another.
TIMEOUT_S = 600.0


def in_world() -> bool:
    """Whether this process is one rank of several: `torch.distributed` runs, or torchrun started it."""
    return dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) > 1


def timeout() -> datetime.timedelta:
    """How long a rank waits for the others.

    Raises:
        MeshError: the environment's number is none.
    """
    text = os.environ.get("FX_FEATHER_TIMEOUT", str(TIMEOUT_S))
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < 1e9:
        fail(
            MeshError,
            call=f"FX_FEATHER_TIMEOUT={text}",
            got=repr(text),
            number=f"{text!r} is no number of seconds",
            rule="a rank waits for the others for a positive number of seconds",
            fix=f"FX_FEATHER_TIMEOUT={TIMEOUT_S:g}, or leave it out",
        )
    return datetime.timedelta(seconds=seconds)


_watch: Watch | None = None


def begin(backend: str, forget: Callable[[], None]) -> None:
    """Begins the world of this process, and ends it, after `forget`, when the process ends."""
    store, rank, size = next(dist.rendezvous("env://", timeout=timeout()))
    # torchrun's store outlives an attempt: who is late must not find what the last one left there.
    store = dist.PrefixStore(f"fx_feather/attempt{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout())
    sys.excepthook = ft.partial(_say_once, sys.excepthook, store, rank)
    global _watch
    _watch = Watch(store, rank, size, end_process)

    def leave() -> None:
        if _watch is not None:
            _watch.stop()
        # After an error others may hang, and to wait for them would hide it.
        if dist.is_initialized() and getattr(sys, "last_type", None) is None:
            forget()
            dist.destroy_process_group()

    atexit.register(leave)


def _say_once(before: Callable[..., Any], store: Any, rank: int, kind: Any, error: Any, trace: Any) -> None:
    """Shows what ended this rank: the traceback of an error that ranks have in common is shown by one of them."""
    text = f"{kind.__name__}: {error}"
    again = False
    if issubclass(kind, FeatherError):
        with contextlib.suppress(Exception):  # the store has gone with the rank that held it
            again = store.add(f"said/{hashlib.sha256(text.encode()).hexdigest()}", 1) > 1
    if again:
        sys.stderr.write(f"rank {rank}: {text.splitlines()[0]} ... as on another rank, which shows it all\n")
    elif getattr(error, "secondary", False):
        sys.stderr.write(f"rank {rank}: {text}\n")
    else:
        before(kind, error, trace)


_busy = threading.RLock()


def _free() -> None:
    global _busy
    _busy = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_free)


@contextlib.contextmanager
def turn(who: str, doing: str, process: int, alone: bool) -> Iterator[None]:
    """One thread at a time runs programs: on a rank that is `alone` it waits, on one of several it is an error.

    Raises:
        RankError: two threads of a rank, or a process that was forked from rank `process`.
    """
    if not alone and process != os.getpid():
        fail(
            RankError,
            call=who,
            got=f"{doing} in process {os.getpid()}",
            number=f"this process was forked from the rank, which is process {process}",
            rule="a rank is one process: its connections to the others can't be shared with a child",
            fix="run steps in the rank itself, and give a child, such as a loader of data, other work only",
        )
    busy = _busy
    if not busy.acquire(blocking=alone):
        fail(
            RankError,
            call=who,
            got=f"{doing} in thread {threading.current_thread().name!r}",
            number="another thread of this rank is in a collective or step",
            rule="all ranks run the same collectives in the same order, which two threads at once don't keep",
            fix="call steps and evaluations of a rank from one thread, one after the other",
        )
    watch = None if alone else _watch
    try:
        if watch is not None:
            watch.enter(doing)
        yield
    finally:
        if watch is not None:
            watch.leave()
        busy.release()


@ft.cache
def pause_at_exit() -> None:
    """Registers a short pause before the interpreter goes."""

    def pause() -> None:
        # A thread of gloo lets go of the tensors of its last collective on its own time. It needs the interpreter for
        # that, and aborts the process if there is none any more; whenever this one sleeps, the other has it.
        for _ in range(10):
            time.sleep(0.005)

    atexit.register(pause)


@contextlib.contextmanager
def peers(who: str, doing: str) -> Iterator[None]:
    """Turns the failure of another rank into a message that names this rank and what it was doing."""
    try:
        yield
    except (RuntimeError, dist.DistError) as e:
        text = str(e)
        if isinstance(e, RankError) or not any(word in text for word in _PEER_WORDS):
            raise
        waited = f" within {timeout().total_seconds():g} s" if "timed out" in text.lower() else ""
        parts = message(
            call=f"{who} lost another rank",
            got=text.splitlines()[0],
            number=f"{doing} did not complete{waited}",
            rule="all ranks take part in every collective; one that died or hangs stops the others",
            fix="look at the rank that failed first; FX_FEATHER_TIMEOUT=seconds sets how long to wait",
        )
        error = RankError(parts)
        error.secondary = True
        raise error from e


_PEER_WORDS = (
    "Connection closed",
    "Connection reset",
    "timed out",
    "Timed out",
    "timeout",
    "Timeout",
    "Broken pipe",
    "closed by peer",
    "Connection refused",
    "NCCL error",
    "Socket",
    "remote process exited",
    "Application timeout",
)
