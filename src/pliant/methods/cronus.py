"""Cronus: devices have networks of their own and learn from robust soft labels of proxy images.

Chang et al., "Cronus: Robust and heterogeneous collaborative learning with black-box knowledge
transfer", 2019; with the spectral filter of Diakonikolas et al., "Being robust (in high dimensions)
can be practical", ICML 2017.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import Tensor

from pliant.data import ImageDataset
from pliant.devices import BudgetPolicy, CostRows, PerDevice
from pliant.devices.vector_rng import IntArray
from pliant.methods import predictions
from pliant.methods.base import (
    LocalTraining,
    Step,
    Task,
    TaskKey,
    TaskKeys,
    Update,
    make_cross_entropy,
    make_step,
    train_locally,
)
from pliant.methods.filter_orders import (
    Widths,
    count_width_filters,
    make_width_table,
    select_width,
)
from pliant.methods.predictions import OwnNetwork, PredictionState
from pliant.methods.robust import AnyLabelMerge, SpectralMean
from pliant.nn.elastic import Elastic
from pliant.nn.subnet import Subnet
from pliant.nn.trainer import SubnetTrainer
from pliant.params import Params
from pliant.value import Count, Value


class Cronus(Value, frozen=True, tag="cronus"):
    """Merge soft labels of proxy images robustly; devices train on these and on their own images.

    Devices have `widths` in turn, by their numbers. In every round, mini-batches of proxy images
    with the last soft labels come between those of a device's own; then it predicts the next
    `proxy_images`. Both are charged to the first step. No network is sent: the score that counts is
    that of the devices' own.

    >>> import pliant as pl
    >>> pl.Cronus(widths=(0.5, 1.0)).merging.share
    0.2
    """

    local: LocalTraining = LocalTraining()
    widths: Widths = (1.0,)
    proxy_images: Count = 256  # of a round
    merging: AnyLabelMerge = SpectralMean()

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
        own_steps, batch = list(steps), self.local.batch
        own, subnet = predictions.open_network(net, task, own_steps)
        labelled = predictions.list_labelled(images, task, batch)
        shares = iter(predictions.share_out(labelled, len(own_steps)))
        train_step = make_step(task)

        def train_both(trainer: SubnetTrainer, step: Step) -> Tensor:
            loss = train_step(trainer, step)
            for x, labels in next(shares):
                trainer.step(x, make_cross_entropy(labels), lr=task.lr)
            return loss

        own_task = replace(task, params=own)
        update = train_locally(net, own_task, own_steps, self.local.optimiser, step_fn=train_both)
        network = predictions.add_delta(own, update)
        x = predictions.draw_images(images, self.proxy_images, task)
        logits = predictions.predict(net, network, subnet, x, batch)
        return predictions.finish_update(update, network, logits.softmax(dim=1))

    def personalise(self, params: Params, device_state: OwnNetwork) -> Params:
        return device_state.network

    def merge(
        self, net: Elastic, state: PredictionState, updates: Sequence[Update]
    ) -> PredictionState:
        if not updates:
            return state
        merged = self.merging.merge_labels(predictions.stack_labels(updates))
        return state.add_labels(merged / merged.sum(dim=1, keepdim=True).clamp(min=1e-12))
