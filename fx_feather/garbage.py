"""Garbage collection, which waits while a program is built: nearly all that is made then stays."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Within the block nothing is collected but what has no references left; it also decorates functions.

    Measured on a model of 64 layers: a third of the time of its compilation.
    """
    was = gc.isenabled()
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
