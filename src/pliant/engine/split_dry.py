"""Dry runs of split methods: every mini-batch is charged, none is computed."""

import numpy as np
import torch
from torch import nn

from pliant.data import Federated, Images
from pliant.devices import Fleet
from pliant.engine.ledger import RoundRecord
from pliant.engine.simulate import Setting
from pliant.engine.split import SplitMethod, simulate_split


def dry_run(
    method: SplitMethod,
    net: nn.Module,
    shape: tuple[int, int, int],
    *,
    clients: int,
    samples: int,
    classes: int,
    rounds: int,
) -> list[RoundRecord]:
    """Return what a run would cost with so many images of this shape on each client.

    Activations are charged as if none were zero.

    >>> import pliant as pl
    >>> net, method = pl.models.lenet_small(), pl.AdaSplit(kappa=0.5)
    >>> size = {"clients": 2, "samples": 32, "classes": 10, "rounds": 2}
    >>> [record.up > 0 for record in pl.dry_run(method, net, (3, 32, 32), **size)]
    [False, True]
    """
    total = clients * samples
    pixels = torch.zeros((1, *shape), dtype=torch.uint8).expand(total, *shape)  # no memory
    labels = torch.zeros(total, dtype=torch.int64)
    unit = ((0.0,) * shape[0], (1.0,) * shape[0])
    images = Images(pixels, labels, classes, *unit, name="blank")
    shares = tuple(np.split(np.arange(total), clients))
    data = Federated(images, images, images, shares, np.zeros(0, np.int64))
    setting = Setting(rounds=rounds)
    return list(
        simulate_split(method, net, data, Fleet(size=clients), setting=setting, is_dry=True)
    )
