"""The heap of a process on the CPU: what a step frees stays with the process, for the next step to take."""

import ctypes
import functools as ft
import os
import platform

#: Parameters of glibc's `mallopt` (mallopt(3)): from how many free bytes at the top on they go back to the system, and
#: from what size on an allocation is mapped apart and given back as soon as it is freed.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_NEVER = (1 << 31) - 1


@ft.cache
def _is_glibc() -> bool:
    return platform.libc_ver()[0] == "glibc"


def give_back() -> None:
    """Returns to the system what is free now, such as what a compilation left behind."""
    if _is_glibc():
        ctypes.CDLL(None).malloc_trim(0)


@ft.cache
def keep_freed() -> bool:
    """Lets the C library keep the memory that tensors free, for the whole process; whether it does.

    A step frees and takes the same buffers again and again. By default glibc returns the large ones to the system,
    which then clears every page of them anew: on a small model that is a tenth of a step, more than all of the
    optimizer. It is what PyTorch's caching allocator does on CUDA. The peak of the memory is the same; between steps
    the process holds on to it.

    Whoever sets one of glibc's own variables (`MALLOC_TRIM_THRESHOLD_`, `MALLOC_MMAP_THRESHOLD_`, `GLIBC_TUNABLES`)
    has the last word. Other C libraries are left as they are.
    """
    chosen = any(name in os.environ for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"))
    if chosen or not _is_glibc():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    # Either alone would stop glibc from raising both by itself. Older versions map 32 MiB and more apart anyway.
    mapped = mallopt(_MMAP_THRESHOLD, _NEVER) or mallopt(_MMAP_THRESHOLD, 32 << 20)
    return bool(mapped and mallopt(_TRIM_THRESHOLD, _NEVER))
