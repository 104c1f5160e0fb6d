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


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collect without the garbage collector: imports leave much, and nearly all of it stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items):
    """Start what mostly waits first, so that it waits beside tests that compute."""
    items.sort(key=lambda item: item.get_closest_marker("waits") is None)


def pytest_collection_finish():
    """Use one thread, search for garbage rarely, and do not wait for disks."""
    import torch  # here, as the process that distributes the tests needs no torch

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 10)  # tests make many objects that are not garbage for long
    os.fsync = lambda handle: None  # no test cuts the power, and a killed process loses nothing
