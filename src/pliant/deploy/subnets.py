"""Sub-networks that a device chose itself, as tensors: masks, factors and how many steps each had.

Most sub-networks need not travel: the server draws them again from the rows that were chosen.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

from pliant.engine.job import World
from pliant.methods.base import Place, Trained
from pliant.nn.elastic import Elastic
from pliant.nn.subnet import Subnet
from pliant.params import Params

TRAINED = "trained"


def drawn(world: World, place: Place, rows: Sequence[int]) -> Trained:
    """Return what rows stand for: the sub-networks of the steps, runs of the same one together."""
    found: list[tuple[Subnet, int]] = []
    for step, row in enumerate(rows):
        subnet = world.method.subnet(world.net, row, place, step)
        if found and found[-1][0] is subnet:
            found[-1] = (subnet, found[-1][1] + 1)
        else:
            found.append((subnet, 1))
    return tuple(found)


def to_tensors(trained: Trained) -> Params:
    """Encode sub-networks and their steps."""
    masks = [np.concatenate(subnet.masks) for subnet, _ in trained]
    return {
        "masks": torch.from_numpy(np.stack(masks).astype(np.uint8)),
        "scales": torch.tensor([subnet.scales for subnet, _ in trained], dtype=torch.float64),
        "steps": torch.tensor([steps for _, steps in trained], dtype=torch.int64),
    }


def from_tensors(net: Elastic, tensors: Params) -> Trained:
    """Decode what `to_tensors` made; the guard judges what it says."""
    masks, scales, steps = (tensors[name] for name in ("masks", "scales", "steps"))
    if masks.ndim != 2 or scales.ndim != 2 or len(masks) != len(scales) or len(masks) != len(steps):
        raise ValueError("sub-networks with their factors and steps, got tables that do not match")
    ends = np.cumsum([0, *net.sizes]).tolist()
    if masks.shape[1] != ends[-1]:
        raise ValueError(f"sub-networks of {ends[-1]} filters, got {masks.shape[1]}")
    found = []
    for mask, scale, count in zip(masks.numpy(), scales.tolist(), steps.tolist(), strict=True):
        parts = tuple(mask[start:stop] == 1 for start, stop in pairwise(ends))
        found.append((Subnet(net.fingerprint, parts, tuple(scale)), count))
    return tuple(found)
