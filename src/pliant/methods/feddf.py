"""FedDF: after every round, teach the merged network what the devices' networks say together.

Lin et al., "Ensemble distillation for robust model fusion in federated learning", NeurIPS 2020.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from pliant.data import ImageDataset
from pliant.methods.base import LocalTraining, Update
from pliant.methods.fedavg import FedAvg
from pliant.methods.fedbuff import RoundMethod
from pliant.methods.verbs import DependsOnFleet
from pliant.nn.elastic import Elastic
from pliant.nn.optimisers import Adam
from pliant.nn.trainer import LossFn, SubnetTrainer
from pliant.params import Params, clone
from pliant.value import Count, Positive, Value


class FedDf(Value, frozen=True, tag="feddf"):
    """Merge as the `inner` method does, then distil the devices' networks into the merged one.

    Teachers are the networks as devices trained them, each at the width it was sent. Their mean
    logits on proxy images, without labels, are what the merged network learns by `steps` steps of
    Adam, whose learning rate falls to 0 along a cosine. The server's work is counted
    (`server_macs`), but takes no virtual time.

    >>> import pliant as pl
    >>> pl.FedDf(pl.HeteroFl(), steps=50).local.epochs
    1
    """

    inner: RoundMethod = FedAvg()
    steps: Count = 100
    batch: Count = 128
    lr: Positive = 1e-3
    temperature: Positive = 1.0

    @property
    def local(self) -> LocalTraining:
        return self.inner.local

    @property
    def merges_stream(self) -> bool:
        return False  # the teachers are needed once the updates are merged

    def __getattr__(self, name: str) -> Any:
        """Do as the inner method does; so this method has the same optional verbs."""
        if name.startswith("_") or name == "inner":  # as a half-built copy asks
            raise AttributeError(name)
        return getattr(self.inner, name)

    def fit_fleet(self, size: int) -> "FedDf":
        if not isinstance(self.inner, DependsOnFleet):
            return self
        return msgspec.structs.replace(self, inner=self.inner.fit_fleet(size))

    def server_macs(self, net: Elastic, updates: Sequence[Update], proxy_images: int) -> float:
        teachers = sum(net.macs(update.subnet or net.full) for update in updates)
        per_image = teachers + net.macs(net.full, training=True)
        return self.steps * min(self.batch, proxy_images) * per_image

    def distil(
        self,
        net: Elastic,
        before: Params,
        merged: Params,
        updates: Sequence[Update],
        images: ImageDataset,
        rng: np.random.Generator,
    ) -> Params:
        teachers = [_make_teacher(net, before, update) for update in updates]
        student = SubnetTrainer(net, merged, Adam(lr=self.lr))
        for step in range(self.steps):
            rows = rng.choice(len(images), min(self.batch, len(images)), replace=False)
            x = images.get_normalised(torch.from_numpy(np.sort(rows)))
            with torch.no_grad():
                logits = torch.stack([teacher(x) for teacher in teachers]).mean(dim=0)
            lr = self.lr * (1 + math.cos(math.pi * step / self.steps)) / 2
            student.step(x, _make_distillation_loss(logits, self.temperature), lr=lr)
        return student.params()


def _make_teacher(net: Elastic, before: Params, update: Update) -> Callable[[Tensor], Tensor]:
    """Return the network that a device has trained, which normalises by its mini-batch."""
    subnet = net.full if update.subnet is None else update.subnet
    sent = before if update.subnet is None else net.take(before, update.subnet)
    params = clone({name: sent[name] + delta for name, delta in update.delta.items()})
    bound = net.bind(subnet)
    return lambda x: net.run(params, bound, x)


def _make_distillation_loss(logits: Tensor, temperature: float) -> LossFn:
    """Make a loss with the gradient of KL(softmax(logits / T) || softmax(output / T)).

    Its gradient, the difference of both probabilities, is exactly 0 if the logits are equal; that
    of the divergence itself is not quite, and Adam would make a full step of what is left.
    """
    target = (logits / temperature).softmax(dim=1)

    def compute_loss(output: Tensor) -> Tensor:
        gap = (output.detach() / temperature).softmax(dim=1) - target
        return (gap / temperature * output).sum(dim=1).mean()

    return compute_loss
