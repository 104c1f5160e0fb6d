"""ELFISH: slow devices train the neurons that matter most, and the others in turn.

Xu et al., "ELFISH: Resource-aware federated learning on heterogeneous edge devices", 2019, and
"Helios: Heterogeneity-aware federated learning with dynamically balanced collaboration", DAC 2021.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Annotated

import numpy as np
import torch
from msgspec import Meta

from pliant.devices import PerRound, Plan, Rows
from pliant.explore.table import Table
from pliant.methods.average import move
from pliant.methods.base import SENT, Local, Place, State, Step, Task, Update, local_training
from pliant.methods.merge import mean_change
from pliant.methods.parts import fine_widths, own_order, taken_first, widths_table
from pliant.nn.elastic import Elastic
from pliant.nn.subnet import Subnet
from pliant.params import Params
from pliant.value import Fraction, Positive, Value


class Elfish(Value, frozen=True, tag="elfish"):
    """Keep a share of the filters by how much they have moved lately, the rest in rotation.

    The whole network travels; what a device has masked comes back unchanged, and a device counts by
    the share of filters that it has trained.

    >>> import pliant as pl
    >>> pl.Elfish(top=0.25, margin=0.7).least
    0.25
    """

    local: Local = Local()
    top: Fraction = 0.5  # share of a device's filters that is chosen by contribution
    least: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.25
    margin: Positive = 1.0

    def plan(self, net: Elastic) -> Plan:
        return PerRound(Rows(self._table(net).shares), self.margin)

    def subnet(self, net: Elastic, row: int, place: Place, step: int) -> Subnet:
        """Return as many filters as the device will train; which ones, it finds out itself."""
        return taken_first(net, self._table(net).rates[row], own_order(net))

    def sends(self, net: Elastic, row: int, place: Place) -> Subnet | None:
        return None

    def train(self, net: Elastic, task: Task, steps: Iterable[Step]) -> Update:
        chosen: dict[tuple[int, ...], Subnet] = {}

        def own(step: Step) -> Step:
            counts = step.subnet.counts
            if counts not in chosen:
                chosen[counts] = self.chosen(net, step.subnet, task.extra, task.place)
            return replace(step, subnet=chosen[counts])

        return local_training(net, task, map(own, steps), self.local.optimiser)

    def merge(self, net: Elastic, state: State, updates: Sequence[Update]) -> State:
        if not updates:
            return state
        change = mean_change(net, state.params, updates, _trained_share)
        return State(move(state.params, change), {SENT: _contributions(net, change)})

    def chosen(self, net: Elastic, subnet: Subnet, extra: Params, place: Place) -> Subnet:
        """Choose the filters that moved most, then others, beginning where the last turn ended."""
        order, rates = [], []
        for site, (size, count) in enumerate(zip(net.sizes, subnet.counts, strict=True)):
            moved = extra.get(str(site), torch.zeros(size))
            best = int(self.top * count) if extra else 0
            ranking = np.argsort(-moved.numpy(), kind="stable")
            others = np.sort(ranking[best:])
            begin = (place.round * (count - best) + place.device) % max(1, len(others))
            order.append(np.concatenate([ranking[:best], np.roll(others, -begin)]))
            rates.append(1.0 - count / size)
        return net.first(rates, tuple(order)) if any(rates) else net.full

    def _table(self, net: Elastic) -> Table:
        return widths_table(net, fine_widths(self.least))


def _trained_share(update: Update) -> float:
    """Return how many samples a device counts for: by the share of filters that it trained."""
    kept = sum(sum(subnet.counts) * steps for subnet, steps in update.trained)
    full = sum(sum(map(len, subnet.masks)) * steps for subnet, steps in update.trained)
    return update.samples * (kept / full if full else 1.0)


def _contributions(net: Elastic, change: Params) -> Params:
    """Return for each site how far each of its filters moved in this round."""
    return {
        str(site): torch.stack(
            [change[layer].square().flatten(1).sum(dim=1) for layer in group.layers]
        )
        .sum(dim=0)
        .sqrt()
        .to(torch.float32)
        for site, group in enumerate(net.groups)
    }
