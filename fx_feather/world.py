"""The world of a process: how it begins and ends, and what is said when another rank is lost."""

import atexit
import contextlib
import datetime
import functools as ft
import math
import os
import sys
import time
from collections.abc import Callable, Iterator

import torch.distributed as dist

from .errors import MeshError, RankError, fail, message

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


def begin(backend: str, forget: Callable[[], None]) -> None:
    """Begins the world of this process, and ends it, after `forget`, when the process ends."""
    dist.init_process_group(backend, timeout=timeout())

    def leave() -> None:
        # After an error others may hang, and to wait for them would hide it.
        if dist.is_initialized() and getattr(sys, "last_type", None) is None:
            forget()
            dist.destroy_process_group()

    atexit.register(leave)


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
        raise RankError(parts) from e


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
