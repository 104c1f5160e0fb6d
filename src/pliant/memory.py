"""Memory that a step gives back is kept for the next one, and given back between rounds.

glibc returns free memory at the end of its heap at once. Where a step's largest tensors lie there,
every step returns and faults in all of them again: measured, 43,000 page faults a second, and steps
of 45 ms in the place of 28.
"""

import ctypes
import sys

TRIM, MAP = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of malloc.h
MOST = 32 * 2**20  # bytes; glibc takes no larger threshold for mapping
KEPT = 2**30  # bytes

_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def keep() -> bool:
    """Keep what is free for the next step; tell whether this C library can."""
    if not hasattr(_LIBC, "mallopt"):
        return False
    assert _LIBC is not None
    return bool(_LIBC.mallopt(TRIM, KEPT) and _LIBC.mallopt(MAP, MOST))


def give_back() -> None:
    """Return what is free to the system."""
    if hasattr(_LIBC, "malloc_trim"):
        assert _LIBC is not None
        _LIBC.malloc_trim(0)
