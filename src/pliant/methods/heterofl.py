"""HeteroFL: nested widths; each device trains the largest that fits at the start of the round.

Diao et al., "HeteroFL: Computation and communication efficient federated learning for heterogeneous
clients", ICLR 2021; widths of 0.7 as in Rapp et al., DISTREAL, AAAI 2022.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from msgspec import Meta
from torch import Tensor

from pliant.devices import BudgetPolicy, CostRows, PerRound
from pliant.devices.vector_rng import IntArray
from pliant.methods.aggregation import (
    CoverageState,
    Updates,
    Weighting,
    cover_sent,
    open_stream,
    track_coverage,
)
from pliant.methods.base import (
    LocalTraining,
    Step,
    Task,
    TaskKey,
    TaskKeys,
    Update,
    make_step,
    train_locally,
)
from pliant.methods.filter_orders import (
    count_width_filters,
    make_fine_widths,
    make_width_table,
    select_width,
)
from pliant.methods.server_optimisers import AnyServerOptimiser, ServerSgd, merge_average
from pliant.nn.elastic import Elastic
from pliant.nn.subnet import Subnet
from pliant.nn.trainer import LossFn
from pliant.params import Params
from pliant.value import Count, Natural, Positive, Value


class HeteroFl(Value, frozen=True, tag="heterofl"):
    """Train the first filters of every site; average each coordinate over the devices that hold it.

    Widths are s^0, s^1, … for `levels` levels, or with `fine` any from the smallest of them to 1;
    with `modules`, they are multiples of 1/modules.

    >>> import pliant as pl
    >>> method = pl.HeteroFl(s=0.5, levels=3)
    >>> [method.s**level for level in range(method.levels)]
    [1.0, 0.5, 0.25]
    """

    merges_stream: ClassVar[bool] = True

    local: LocalTraining = LocalTraining()
    s: Annotated[float, Meta(gt=0.0, lt=1.0)] = 0.7
    levels: Count = 5
    fine: bool = False
    modules: Natural = 0  # equal parts of every site; if not 0, widths are 1 to all of them
    margin: Positive = 1.0
    scaled: bool = True  # the paper's scaler; no effect before a batch norm
    masked: bool = False  # do not train classes that a device lacks (for non-iid data)
    weighting: Weighting = "equal"
    server: AnyServerOptimiser = ServerSgd()

    def __post_init__(self) -> None:
        Value.__post_init__(self)
        if self.fine and self.modules:
            raise ValueError("Expected `fine` or `modules`, got both - at `$.modules` of HeteroFl")

    @property
    def needs_classes(self) -> bool:
        return self.masked

    def make_budget_policy(self, net: Elastic) -> BudgetPolicy:
        return PerRound(CostRows(make_width_table(net, self._list_widths()).shares), self.margin)

    def select_subnet(self, net: Elastic, row: int, key: TaskKey, step: int) -> Subnet:
        return select_width(net, self._list_widths(), row, self.scaled)

    def count_filters(self, net: Elastic, rows: IntArray, keys: TaskKeys, step: int) -> IntArray:
        return self.max_filters(net)[rows]

    def max_filters(self, net: Elastic) -> IntArray:
        return count_width_filters(net, self._list_widths())

    def subnet_to_send(self, net: Elastic, row: int, key: TaskKey) -> Subnet | None:
        return self.select_subnet(net, row, key, 0)

    def init_state(self, params: Params) -> CoverageState:
        return CoverageState(params)

    def train(self, net: Elastic, task: Task, steps: Iterable[Step]) -> Update:
        if not self.masked:
            return train_locally(net, task, steps, self.local.optimiser)
        owned = torch.zeros(net.program.param_shapes[_find_classifier(net)][0])
        owned[list(task.classes)] = 1.0

        def make_masked_loss(labels: Tensor) -> LossFn:
            # absent classes get a logit of 0, not -infinity
            return lambda output: F.cross_entropy(output * owned.to(output), labels)

        step_fn = make_step(task, make_loss=make_masked_loss)
        update = train_locally(net, task, steps, self.local.optimiser, step_fn=step_fn)
        return replace(update, extra={"owned": owned})

    def merge(self, net: Elastic, state: CoverageState, updates: Updates) -> CoverageState:
        stream = open_stream(updates)
        cover = _cover_owned_classes
        merged = merge_average(self.server, net, state, stream, self.weighting, cover)
        return track_coverage(merged, stream.seen)

    def _list_widths(self) -> tuple[float, ...]:
        if self.modules:
            return tuple(number / self.modules for number in range(1, self.modules + 1))
        widths = tuple(self.s**level for level in range(self.levels))
        return make_fine_widths(widths[-1]) if self.fine else widths


def _cover_owned_classes(net: Elastic, params: Params, update: Update) -> Params:
    """Cover what the device was sent, except the classifier's rows of classes it lacks."""
    cover = cover_sent(net, params, update)
    if "owned" in update.extra:
        weight = _find_classifier(net)
        for name in (weight, f"{weight.removesuffix('weight')}bias"):
            if name in cover:
                row_shape = (-1, *[1] * (cover[name].ndim - 1))
                cover[name] = cover[name] * (update.extra["owned"] > 0).view(row_shape)
    return cover


def _find_classifier(net: Elastic) -> str:
    """Return the name of the last layer's weight, which has one row per class."""
    return net.program.layer_costs[-1].layer
