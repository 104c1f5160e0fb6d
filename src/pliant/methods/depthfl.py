"""DepthFL: each device trains the first stages of a network with exits, as many as it can afford.

Kim et al., "DepthFL: Depthwise federated learning for heterogeneous clients", ICLR 2023.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from pliant.devices import BudgetPolicy, CostRows, PerRound
from pliant.methods.aggregation import Updates, Weighting, open_stream
from pliant.methods.base import LocalTraining, Step, Task, TaskKey, Update, make_step
from pliant.methods.depth import check_exits, count_macs, peek_row, train_part
from pliant.methods.server_optimisers import AnyServerOptimiser, ServerSgd, merge_average
from pliant.nn.elastic import Elastic
from pliant.nn.exits import count_exits, select_depth
from pliant.nn.trainer import LossFn
from pliant.params import Params
from pliant.value import Positive, Value


@dataclass(frozen=True)
class DepthState:
    """The network, and the number of stages that any device has trained so far."""

    params: Params
    depth: int = 0
    momentum: Params = field(default_factory=dict)  # of a server optimiser
    square: Params = field(default_factory=dict)  # likewise


class DepthFl(Value, frozen=True, tag="depthfl"):
    """Train all exits up to the deepest that fits at the start of the round.

    Every exit learns from the labels and, with `distilled`, from the other exits of the device.
    Each layer is averaged over the devices that trained it; the deepest exit that any device has
    trained is scored. The whole network is charged, although a device needs only its own stages.

    >>> import pliant as pl
    >>> pl.DepthFl(distilled=False).weighting
    'samples'
    """

    merges_stream: ClassVar[bool] = True

    local: LocalTraining = LocalTraining()
    distilled: bool = True
    margin: Positive = 1.0
    weighting: Weighting = "samples"
    server: AnyServerOptimiser = ServerSgd()

    def make_budget_policy(self, net: Elastic) -> BudgetPolicy:
        parts = [_select_part(net, row) for row in range(count_exits(net))]
        costs = tuple(count_macs(part) / count_macs(net) for part in parts)
        return PerRound(CostRows(costs), self.margin)

    def init_state(self, params: Params) -> DepthState:
        check_exits(params)
        return DepthState(params)

    def select_trained(self, net: Elastic, state: DepthState, last_row: int | None) -> Elastic:
        return select_depth(net, min(max(1, state.depth), count_exits(net)))

    def select_own(self, net: Elastic, update: Update) -> Elastic:
        return select_depth(net, int(update.extra["depth"]))

    def macs(self, net: Elastic, row: int, key: TaskKey, step: int) -> float:
        return count_macs(_select_part(net, row))

    def extra_upload_bytes(self, net: Elastic) -> int:
        return 8  # the depth

    def train(self, net: Elastic, task: Task, steps: Iterable[Step]) -> Update:
        row, steps = peek_row(steps)
        step_fn = make_step(task, make_loss=self._make_joint_loss) if row else None
        part = _select_part(net, row)
        update = train_part(net, part, task, steps, self.local.optimiser, step_fn)
        return replace(update, extra={"depth": torch.tensor(row + 1)})

    def merge(self, net: Elastic, state: DepthState, updates: Updates) -> DepthState:
        stream, depths = open_stream(updates), [state.depth]
        stream.observe(lambda update: depths.append(int(update.extra["depth"])))
        merged = merge_average(self.server, net, state, stream, self.weighting, _cover_stages)
        return replace(merged, depth=max(depths))

    def _make_joint_loss(self, labels: Tensor) -> LossFn:
        def compute_loss(outputs: tuple[Tensor, ...]) -> Tensor:
            loss = torch.stack([F.cross_entropy(output, labels) for output in outputs]).sum()
            divergence = _compute_divergence(outputs) if self.distilled else 0.0
            return loss + divergence / (len(outputs) - 1)

        return compute_loss


def _select_part(net: Elastic, row: int) -> Elastic:
    return select_depth(net, row + 1, all_exits=row > 0)


def _compute_divergence(outputs: tuple[Tensor, ...]) -> Tensor:
    """Sum KL(teacher || student) over all pairs of exits; teachers are constant."""
    terms = [
        F.kl_div(student.log_softmax(1), teacher.detach().softmax(1), reduction="batchmean")
        for student in outputs
        for teacher in outputs
        if student is not teacher
    ]
    return torch.stack(terms).sum()


def _cover_stages(net: Elastic, params: Params, update: Update) -> Params:
    """Cover the stages and exits up to the device's depth; names are like `stages.0.weight`."""
    depth = int(update.extra["depth"])
    return {
        name: torch.full_like(tensor, int(name.split(".")[1]) < depth, dtype=torch.float32)
        for name, tensor in params.items()
    }
