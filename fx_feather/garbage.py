"""Garbage collection, which waits while a program is built: nearly all that is made then stays."""

import contextlib
import gc
import sys
from collections.abc import Iterator

#: How much larger the heap may be than after the last whole collection before a new program is built.
GROWTH = 1.5

#: Blocks of memory that the interpreter had after the last whole collection.
_blocks: int | None = None


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Within the block nothing is collected but what has no references left; it also decorates functions.

    Measured on a model of 64 layers: a third of the time of its compilation. What was built before, and is garbage by
    now, goes before the next build, if there is much of it.
    """
    was = gc.isenabled()
    if was:
        _collect()
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():
            # Through the frozen generation to the oldest, unseen: what was made is no longer young, and stays.
            gc.freeze()
            gc.unfreeze()
        if was:
            gc.enable()


def _collect() -> None:
    """A whole collection, if the heap has grown since the last one: of what goes to the oldest generation unseen, the
    interpreter's own trigger knows nothing."""
    global _blocks
    now = sys.getallocatedblocks()
    if _blocks is None:
        _blocks = now
    elif now > GROWTH * _blocks:
        gc.collect()
        _blocks = sys.getallocatedblocks()
