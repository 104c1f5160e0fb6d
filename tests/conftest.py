"""Settings for every test: one thread per process, and the same examples on every run."""

import torch
from hypothesis import settings

torch.set_num_threads(1)

# A newcomer's `make test` must not fail by chance or by a busy machine.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")
