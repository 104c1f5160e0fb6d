"""A bare PyTorch loop of FedAvg over worker processes, the baseline for the engine."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pliant.data import FederatedData

LR, BATCH = 0.1, 32
Weights = dict[str, Any]  # numpy arrays

_net: nn.Module
_images: list[Tensor]
_labels: list[Tensor]


@contextmanager
def open_bare_loop(
    make: Callable[[], tuple[nn.Module, FederatedData]], workers: int, per_round: int
) -> Iterator[Callable[[bool], None]]:
    """Start workers that hold network and data; yield a function that runs a round.

    A round trains some devices, one per job, in channels-last format or not, and averages them.
    """
    net, data = make()
    weights: Weights = {name: p.numpy() for name, p in net.state_dict().items()}
    round_numbers = count(1)

    def run_round(channels_last: bool) -> None:
        nonlocal weights
        number = next(round_numbers)
        devices = np.random.default_rng(number).choice(len(data), per_round, replace=False)
        jobs = [(weights, int(device), number, channels_last) for device in devices]
        total: Weights = {}
        for trained in pool.imap_unordered(_train, jobs):
            for name, array in trained.items():
                total[name] = total[name] + array if name in total else array
        weights = {name: array / per_round for name, array in total.items()}

    with get_context("spawn").Pool(workers, _init_worker, (make,)) as pool:
        yield run_round


def _init_worker(make: Callable[[], tuple[nn.Module, FederatedData]]) -> None:
    global _net, _images, _labels
    torch.set_num_threads(1)
    _net, data = make()
    _images = [data.train.get_normalised(share) for share in data.shares]
    _labels = [data.train.labels[share] for share in data.shares]


def _train(job: tuple[Weights, int, int, bool]) -> Weights:
    weights, device, round_number, channels_last = job
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    _net.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})
    _net.train()
    optimiser = torch.optim.SGD(_net.parameters(), lr=LR)
    images, labels = _images[device], _labels[device]
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(round_number))
    losses = 0.0  # the engine reports losses, so the baseline must compute them too
    for start in range(0, len(labels), BATCH):
        batch = order[start : start + BATCH]
        optimiser.zero_grad()
        x = images[batch].contiguous(memory_format=memory_format)
        loss: Any = F.cross_entropy(_net(x), labels[batch])
        loss.backward()
        optimiser.step()
        losses += float(loss.detach())
    return {name: tensor.numpy().copy() for name, tensor in _net.state_dict().items()}
