"""Settings for every test: one thread per process, and the same examples on every run."""

import signal

import torch
from hypothesis import settings

torch.set_num_threads(1)

# A shell starts what runs in its background with Ctrl-C ignored, and children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A newcomer's `make test` must not fail by chance or by a busy machine.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")
