"""The memory and the cores of this process.

Freed memory is kept for the next training step, and returned to the system between rounds. glibc
would return free memory at the end of its heap at once. If a step's largest tensors are there, each
step returns them and faults them in again: measured, 43,000 page faults per second and 45 ms per
step instead of 28.
"""

import ctypes
import os
import sys
from pathlib import Path

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # from malloc.h
MMAP_THRESHOLD = 32 * 2**20  # bytes; the largest that glibc accepts
TRIM_THRESHOLD = 2**30  # bytes
KERNELS = 4096  # oneDNN keeps 1,024; coins give DenseNet-40 about 90 new ones per step
MAX_FILES = 65536
CGROUP = Path("/sys/fs/cgroup")

_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def retain_freed_memory() -> bool:
    """Make malloc keep freed memory; return whether this C library supports it."""
    if mallopt := getattr(_LIBC, "mallopt", None):
        options = ((M_TRIM_THRESHOLD, TRIM_THRESHOLD), (M_MMAP_THRESHOLD, MMAP_THRESHOLD))
        return all(mallopt(*option) for option in options)
    return False


def retain_compiled_kernels() -> None:
    """Make oneDNN keep more of the kernels that it compiles, one for each new shape.

    It reads this when the process runs its first convolution. What the user has set holds.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(KERNELS))


def release_freed_memory() -> None:
    """Return freed memory to the system."""
    if malloc_trim := getattr(_LIBC, "malloc_trim", None):
        malloc_trim(0)


def raise_file_limit() -> None:
    """Let this process have as many connections as its administrator allows; services start low."""
    if sys.platform == "linux":
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))


def measure_cores(cgroup: Path = CGROUP) -> float:
    """Return how many cores this process may use, by its affinity and its container's quota."""
    affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    cores = float(len(affinity) or os.cpu_count() or 1)
    quota = read_cpu_quota(cgroup)
    return cores if quota is None else min(cores, quota)


def read_cpu_quota(cgroup: Path = CGROUP) -> float | None:
    """Return how many cores the cgroup (v2 or v1) allows; None without a limit."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (cgroup / "cpu" / "cpu.cfs_quota_us").read_text()
            period = (cgroup / "cpu" / "cpu.cfs_period_us").read_text()
        except OSError:
            return None
    try:
        share = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):  # "max"
        return None
    return share if share > 0 else None
