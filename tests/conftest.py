"""Settings for all tests: one thread per process, and the same examples on every run."""

import signal

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

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


def pytest_collection_modifyitems(items):
    """Start what mostly waits first, so that it waits beside tests that compute."""
    items.sort(key=lambda item: item.get_closest_marker("waits") is None)
