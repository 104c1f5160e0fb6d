"""FedMD: devices have networks of their own and learn from each other's logits on proxy images.

Li, Wang, "FedMD: Heterogenous federated learning via model distillation", 2019. The first training
on labelled public images is left out: the labels of proxy images are not used.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor

from pliant.data import ImageDataset
from pliant.devices import BudgetPolicy, CostRows, PerDevice
from pliant.devices.vector_rng import IntArray
from pliant.methods import predictions
from pliant.methods.base import LocalTraining, Step, Task, TaskKey, TaskKeys, Update, train_locally
from pliant.methods.filter_orders import (
    Widths,
    count_width_filters,
    make_width_table,
    select_width,
)
from pliant.methods.predictions import OwnNetwork, PredictionState
from pliant.nn.elastic import Elastic
from pliant.nn.optimisers import Adam
from pliant.nn.subnet import Subnet
from pliant.nn.trainer import LossFn, SubnetTrainer
from pliant.params import Params
from pliant.value import Count, Positive, Value


class FedMd(Value, frozen=True, tag="fedmd"):
    """Average logits on proxy images; devices learn the mean, then train on their own images.

    Devices have `widths` in turn, by their numbers. In every round they learn the last mean logits
    (mean absolute error, one pass of Adam), make their local steps, and predict the next
    `proxy_images`. Both are charged to the first step. No network is sent: the score that counts is
    that of the devices' own.

    >>> import pliant as pl
    >>> pl.FedMd(widths=(0.5, 1.0)).proxy_images
    256
    """

    local: LocalTraining = LocalTraining()
    widths: Widths = (1.0,)
    proxy_images: Count = 256  # of a round
    batch: Count = 64  # of these
    lr: Positive = 1e-3  # of learning from them

    def make_budget_policy(self, net: Elastic) -> BudgetPolicy:
        return PerDevice(CostRows(make_width_table(net, self.widths).shares))

    def select_subnet(self, net: Elastic, row: int, key: TaskKey, step: int) -> Subnet:
        return select_width(net, self.widths, row)

    def count_filters(self, net: Elastic, rows: IntArray, keys: TaskKeys, step: int) -> IntArray:
        return count_width_filters(net, self.widths)[rows]

    def max_filters(self, net: Elastic) -> IntArray:
        return count_width_filters(net, self.widths)

    def proxy_macs(self, net: Elastic, state: PredictionState, row: int) -> float:
        subnet = select_width(net, self.widths, row)
        return predictions.count_proxy_macs(net, subnet, state, self.proxy_images)

    def extra_upload_bytes(self, net: Elastic) -> int:
        return predictions.count_label_bytes(net, self.proxy_images)

    def init_state(self, params: Params) -> PredictionState:
        return PredictionState(params)

    def init_device_state(self, params: Params) -> OwnNetwork:
        return OwnNetwork()

    def broadcast(self, state: PredictionState) -> Params:
        return state.broadcast()

    def train_with_proxy(
        self, net: Elastic, task: Task, steps: Iterable[Step], images: ImageDataset
    ) -> Update:
        own_steps = list(steps)
        own, subnet = predictions.open_network(net, task, own_steps)
        trainer = SubnetTrainer(net, own, Adam(lr=self.lr))
        trainer.switch(subnet)
        for x, logits in predictions.list_labelled(images, task, self.batch):
            trainer.step(x, _make_loss(logits))
        own = trainer.params()
        update = train_locally(net, replace(task, params=own), own_steps, self.local.optimiser)
        network = predictions.add_delta(own, update)
        x = predictions.draw_images(images, self.proxy_images, task)
        logits = predictions.predict(net, network, subnet, x, self.batch)
        return predictions.finish_update(update, network, logits)

    def personalise(self, params: Params, device_state: OwnNetwork) -> Params:
        return device_state.network

    def merge(
        self, net: Elastic, state: PredictionState, updates: Sequence[Update]
    ) -> PredictionState:
        if not updates:
            return state
        return state.add_labels(predictions.stack_labels(updates).mean(dim=0))


def _make_loss(logits: Tensor) -> LossFn:
    return lambda output: F.l1_loss(output, logits)
