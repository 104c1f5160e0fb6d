"""The cost of a split run, without running it."""

import numpy as np
import torch
from torch import nn

from pliant.data import FederatedData, ImageDataset
from pliant.devices import Fleet
from pliant.engine.ledger import RoundRecord
from pliant.engine.round_loop import RunSettings
from pliant.engine.round_rules import RoundRules
from pliant.engine.split_loop import SplitMethod, simulate_split


def estimate_split_cost(
    method: SplitMethod,
    net: nn.Module,
    shape: tuple[int, int, int],
    *,
    clients: int,
    samples: int,
    classes: int,
    rounds: int,
) -> list[RoundRecord]:
    """Estimate the cost of a run with `samples` images of this shape on each client.

    Activations are charged as dense.

    >>> import pliant as pl
    >>> net, method = pl.models.lenet_small(), pl.AdaSplit(kappa=0.5)
    >>> size = {"clients": 2, "samples": 32, "classes": 10, "rounds": 2}
    >>> [record.up > 0 for record in pl.estimate_split_cost(method, net, (3, 32, 32), **size)]
    [False, True]
    """
    total = clients * samples
    pixels = torch.zeros((1, *shape), dtype=torch.uint8).expand(total, *shape)  # takes no memory
    labels = torch.zeros(total, dtype=torch.int64)
    mean, std = (0.0,) * shape[0], (1.0,) * shape[0]
    images = ImageDataset(pixels, labels, classes, mean, std, name="blank")
    shares = tuple(np.split(np.arange(total), clients))
    data = FederatedData(images, images, images, shares, np.zeros(0, np.int64))
    fleet, rules = Fleet(size=clients), RoundRules(late="wait")
    settings = RunSettings(rounds=rounds, per_round=clients, rules=rules)
    return list(simulate_split(method, net, data, fleet, settings=settings, is_dry=True))
