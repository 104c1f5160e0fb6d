"""ELFISH: slow devices train the most important neurons and rotate through the others.

Xu et al., "ELFISH: Resource-aware federated learning on heterogeneous edge devices", 2019, and
"Helios: Heterogeneity-aware federated learning with dynamically balanced collaboration", DAC 2021.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from pliant.devices import BudgetPolicy, CostRows, PerRound
from pliant.devices.vector_rng import IntArray
from pliant.methods.aggregation import Updates, average_deltas, open_stream
from pliant.methods.base import LocalTraining, Step, Task, TaskKey, TaskKeys, Update, train_locally
from pliant.methods.filter_orders import Width, make_fine_widths, make_width_table, select_prefix
from pliant.methods.server_optimisers import (
    AnyServerOptimiser,
    ServerSgd,
    measure_squares,
    take_server_step,
)
from pliant.nn.elastic import Elastic
from pliant.nn.filter_counts import count_prefix_filters
from pliant.nn.pareto_table import ParetoTable
from pliant.nn.subnet import Subnet
from pliant.params import Params
from pliant.value import Fraction, Positive, Value


@dataclass(frozen=True)
class ElfishState:
    """The network, and how far each filter of each site moved in the last round."""

    params: Params
    contributions: Params = field(default_factory=dict)
    momentum: Params = field(default_factory=dict)  # of a server optimiser
    square: Params = field(default_factory=dict)  # likewise


class Elfish(Value, frozen=True, tag="elfish"):
    """Train the filters that changed most last round, and the others in rotation.

    Devices are sent the full network and return masked filters unchanged. A device's weight is
    proportional to the share of filters it trained.

    >>> import pliant as pl
    >>> pl.Elfish(top=0.25, margin=0.7).min_width
    0.25
    """

    merges_stream: ClassVar[bool] = True

    local: LocalTraining = LocalTraining()
    top: Fraction = 0.5  # share of a device's filters chosen by contribution
    min_width: Width = 0.25
    margin: Positive = 1.0
    server: AnyServerOptimiser = ServerSgd()

    def make_budget_policy(self, net: Elastic) -> BudgetPolicy:
        return PerRound(CostRows(self._make_table(net).shares), self.margin)

    def select_subnet(self, net: Elastic, row: int, key: TaskKey, step: int) -> Subnet:
        """Return a subnet of the right size; the device selects the filters itself."""
        return select_prefix(net, self._make_table(net).rates[row])

    def count_filters(self, net: Elastic, rows: IntArray, keys: TaskKeys, step: int) -> IntArray:
        return count_prefix_filters(net, self._make_table(net).rates)[rows]

    def max_filters(self, net: Elastic) -> IntArray:
        return count_prefix_filters(net, self._make_table(net).rates)

    def train(self, net: Elastic, task: Task, steps: Iterable[Step]) -> Update:
        subnets: dict[tuple[int, ...], Subnet] = {}

        def replace_subnet(step: Step) -> Step:
            counts = step.subnet.counts
            if counts not in subnets:
                subnets[counts] = self.select_filters(net, step.subnet, task.extra, task.key)
            return replace(step, subnet=subnets[counts])

        return train_locally(net, task, map(replace_subnet, steps), self.local.optimiser)

    def merge(self, net: Elastic, state: ElfishState, updates: Updates) -> ElfishState:
        weight, stream = _weight_by_trained_share, open_stream(updates)
        squares = measure_squares(self.server, net, stream)
        delta = average_deltas(net, state.params, stream, weight)
        if not stream.seen:
            return state
        merged = take_server_step(self.server, net, state, delta, stream.seen, weight, squares)
        return replace(merged, contributions=_measure_contributions(net, delta))

    def init_state(self, params: Params) -> ElfishState:
        return ElfishState(params)

    def broadcast(self, state: ElfishState) -> Params:
        return state.contributions

    def select_filters(self, net: Elastic, subnet: Subnet, extra: Params, key: TaskKey) -> Subnet:
        """Select the filters that changed most, then the next ones in rotation."""
        orders, rates = [], []
        for site, (size, count) in enumerate(zip(net.sizes, subnet.counts, strict=True)):
            contributions = extra.get(str(site), torch.zeros(size))
            num_top = int(self.top * count) if extra else 0
            ranking = np.argsort(-contributions.numpy(), kind="stable")
            others = np.sort(ranking[num_top:])
            start = (key.round * (count - num_top) + key.device) % max(1, len(others))
            orders.append(np.concatenate([ranking[:num_top], np.roll(others, -start)]))
            rates.append(1.0 - count / size)
        return net.select_prefix(rates, tuple(orders)) if any(rates) else net.full

    def _make_table(self, net: Elastic) -> ParetoTable:
        return make_width_table(net, make_fine_widths(self.min_width))


def _weight_by_trained_share(update: Update) -> float:
    """Weight a device by its samples times the share of filters it trained."""
    trained = sum(sum(subnet.counts) * steps for subnet, steps in update.subnet_steps)
    full = sum(sum(map(len, subnet.masks)) * steps for subnet, steps in update.subnet_steps)
    return update.samples * (trained / full if full else 1.0)


def _measure_contributions(net: Elastic, delta: Params) -> Params:
    """Return one tensor per site: how far each of its filters moved in this round."""
    return {
        str(site): torch.stack(
            [
                _sum_squares(delta[layer].transpose(0, dim), block, group.filters)
                for layer, block, dim in zip(group.layers, group.blocks, group.dims, strict=True)
            ]
        )
        .sum(dim=0)
        .sqrt()
        .to(torch.float32)
        for site, group in enumerate(net.groups)
    }


def _sum_squares(delta: Tensor, block: int, filters: int) -> Tensor:
    """Return one number per filter; parts of a layer that share a mask are added."""
    per_output = delta.square().flatten(1).sum(dim=1)
    return per_output.view(-1, block).sum(dim=1).view(-1, filters).sum(dim=0)
