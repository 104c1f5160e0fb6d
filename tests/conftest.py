"""Settings for all tests: one thread per process, and the same examples on every run."""

import gc
import os
import signal

import pytest
from hypothesis import HealthCheck, settings

# Shells start background jobs with Ctrl-C ignored, and child processes inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# `make test` must not fail by chance or on a busy machine.
settings.register_profile(
    "repeatable",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("repeatable")

COMPUTING_PER_WAITING = 10  # files: with three processes, about one of them waits


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collect without the garbage collector: imports leave much, and nearly all of it stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items):
    """Spread files that mostly wait among files that compute, so that no core is idle."""
    files = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    waiting, computing = [], []
    for tests in files.values():
        waits = any(test.get_closest_marker("waits") for test in tests)
        (waiting if waits else computing).append(tests)
    order = []
    for start in range(0, len(computing), COMPUTING_PER_WAITING):
        order += waiting[:1] + computing[start : start + COMPUTING_PER_WAITING]
        del waiting[:1]
    items[:] = [test for tests in order + waiting for test in tests]


def pytest_collection_finish():
    """Use one thread, search for garbage rarely, and do not wait for disks."""
    import torch  # here, as the process that distributes the tests needs no torch

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 10)  # tests make many objects that are not garbage for long
    os.fsync = lambda handle: None  # no test cuts the power, and a killed process loses nothing
