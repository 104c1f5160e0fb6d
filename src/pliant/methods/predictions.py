"""Predictions on proxy images, which devices send instead of their networks."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from pliant.data import ImageDataset
from pliant.methods.base import Step, Task, Update
from pliant.nn.elastic import Elastic
from pliant.nn.growth import silence_filters
from pliant.nn.subnet import Subnet
from pliant.params import Params, get_params
from pliant.rng import rng_stream

Labelled = list[tuple[Tensor, Tensor]]  # mini-batches of images and labels


@dataclass(frozen=True)
class PredictionState:
    """The network that all devices began with, and what they predict together.

    Every merge draws other proxy images: `labels` are those of draw `draws` - 1.
    """

    params: Params
    labels: Tensor = field(default_factory=lambda: torch.zeros(0))  # (image, class)
    draws: int = 0

    def broadcast(self) -> Params:
        """Return what devices are sent: the labels, if there are any, and the number of draws."""
        draws = {"draws": torch.tensor(self.draws)}
        return {"labels": self.labels, **draws} if self.draws else draws

    def add_labels(self, labels: Tensor) -> "PredictionState":
        """Return the state after a merge."""
        return replace(self, labels=labels.to(torch.float32), draws=self.draws + 1)


@dataclass(frozen=True)
class OwnNetwork:
    """The network of a device; empty before its first task."""

    network: Params = field(default_factory=dict)


def open_network(net: Elastic, task: Task, steps: Sequence[Step]) -> tuple[Params, Subnet]:
    """Return a device's own network and the subnet that it is.

    Filters that are not part of a narrow network are silent, so that it can be run at full size.
    """
    subnet = steps[0].subnet if steps else net.full
    own = task.device_state.network
    return own or silence_filters(net, get_params(net.module), subnet), subnet


def draw_images(images: ImageDataset, number: int, task: Task, ago: int = 0) -> Tensor:
    """Return the proxy images to predict, the same for all devices, or those `ago` merges ago."""
    rng = rng_stream(task.key.seed, "proxy images", int(task.extra["draws"]) - ago)
    rows = np.sort(rng.choice(len(images), number, replace=False))
    return images.get_normalised(torch.from_numpy(rows))


def list_labelled(images: ImageDataset, task: Task, batch: int) -> Labelled:
    """Return mini-batches of the last draw's images and the labels sent; none at first."""
    if "labels" not in task.extra:
        return []
    labels = task.extra["labels"]
    x = draw_images(images, len(labels), task, ago=1)
    return list(zip(_split(x, batch), _split(labels, batch), strict=True))


def share_out(batches: Labelled, parts: int) -> list[Labelled]:
    """Divide mini-batches among parts as evenly as possible."""
    bounds = [len(batches) * part // max(1, parts) for part in range(parts + 1)]
    return [batches[start:stop] for start, stop in pairwise(bounds)]


@torch.no_grad()
def predict(net: Elastic, network: Params, subnet: Subnet, x: Tensor, batch: int) -> Tensor:
    """Return logits; norm layers normalise by the mini-batch."""
    bound = net.bind(subnet)
    params = net.take(network, bound)  # a copy, as running statistics change
    return torch.cat([net.run(params, bound, part) for part in _split(x, batch)])


def add_delta(own: Params, update: Update) -> Params:
    """Return a device's network after its local training."""
    return {name: own[name] + delta for name, delta in update.delta.items()}


def finish_update(update: Update, network: Params, labels: Tensor) -> Update:
    """Return the update of a device that keeps its network and sends labels."""
    return replace(update, delta={}, extra={"labels": labels}, device_state=OwnNetwork(network))


def stack_labels(updates: Iterable[Update]) -> Tensor:
    """Return all labels in float64 and in device order: (device, image, class)."""
    ordered = sorted(updates, key=lambda update: update.device)
    return torch.stack([update.extra["labels"].to(torch.float64) for update in ordered])


def count_label_bytes(net: Elastic, images: int) -> int:
    """Return the bytes of the labels of some images, four per class."""
    classes = net.module.get_parameter(net.program.layer_costs[-1].layer).shape[0]
    return 4 * images * classes


def count_proxy_macs(net: Elastic, subnet: Subnet, state: PredictionState, images: int) -> float:
    """Return the MACs of learning the labels sent, if any, and of predicting the next."""
    learnt = net.macs(subnet, training=True) if state.draws else 0.0
    return images * (learnt + net.macs(subnet))


def _split(x: Tensor, batch: int) -> tuple[Tensor, ...]:
    """Split into mini-batches of nearly equal size: batch norm cannot train on a single sample."""
    return x.tensor_split(math.ceil(len(x) / batch))
