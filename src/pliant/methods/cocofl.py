"""CoCoFL without quantisation: each device trains a random block of layers and freezes the others.

Pfeiffer et al., "CoCoFL: Communication- and computation-aware federated learning via partial NN
freezing and quantization", TMLR 2023.
"""

from collections.abc import Iterable
from itertools import combinations
from typing import ClassVar

from torch import Tensor

from pliant.devices import BudgetPolicy, CostRows, PerRound
from pliant.methods.aggregation import Updates, Weighting
from pliant.methods.base import (
    LocalTraining,
    ServerState,
    Step,
    Task,
    TaskKey,
    Update,
    make_step,
    train_locally,
)
from pliant.methods.server_optimisers import AnyServerOptimiser, ServerSgd, merge_average
from pliant.nn.elastic import Elastic
from pliant.nn.frozen_cost import count_training_macs, group_params
from pliant.nn.net_cache import cache_on_net
from pliant.nn.trainer import SubnetTrainer
from pliant.value import Positive, Value


class CoCoFl(Value, frozen=True, tag="cocofl"):
    """Train a block of consecutive layers that fits at the start of the round.

    It is drawn among the blocks that could not be longer. A step costs the forward pass, and the
    gradient from the loss to the block. A layer that a device froze counts as unchanged in the
    mean. Frozen layers are charged to the upload although they need not be sent.

    >>> import pliant as pl
    >>> pl.CoCoFl(margin=0.9).weighting
    'samples'
    """

    merges_stream: ClassVar[bool] = True

    local: LocalTraining = LocalTraining()
    margin: Positive = 1.0
    weighting: Weighting = "samples"
    server: AnyServerOptimiser = ServerSgd()

    def make_budget_policy(self, net: Elastic) -> BudgetPolicy:
        full = net.macs(net.full, training=True)
        return PerRound(CostRows(tuple(cost / full for cost in _list_costs(net))), self.margin)

    def macs(self, net: Elastic, row: int, key: TaskKey, step: int) -> float:
        return _count_macs(net)[_draw_block(net, row, key)]

    def train(self, net: Elastic, task: Task, steps: Iterable[Step]) -> Update:
        train_step = make_step(task)

        def train_block(trainer: SubnetTrainer, step: Step) -> Tensor:
            trainer.freeze(_list_frozen(net, _draw_block(net, step.row, task.key)))
            return train_step(trainer, step)

        return train_locally(net, task, steps, self.local.optimiser, step_fn=train_block)

    def merge(self, net: Elastic, state: ServerState, updates: Updates) -> ServerState:
        return merge_average(self.server, net, state, updates, self.weighting)


Block = tuple[int, int]  # the first layer that is trained, and the first after it that is not


def _draw_block(net: Elastic, row: int, key: TaskKey) -> Block:
    """Draw one of the largest blocks that fit, the same for the whole round."""
    blocks = _list_largest(net, row)
    return blocks[int(key.rng_stream("block").integers(len(blocks)))]


@cache_on_net
def _list_largest(net: Elastic, row: int) -> tuple[Block, ...]:
    """Return the blocks that cost at most as much as a row, without parts of one another."""
    fitting = [b for b, cost in _count_macs(net).items() if cost <= _list_costs(net)[row]]
    return tuple(b for b in fitting if sum(o[0] <= b[0] and b[1] <= o[1] for o in fitting) == 1)


@cache_on_net
def _list_costs(net: Elastic) -> tuple[float, ...]:
    """Return the costs of all blocks in rising order, one row each."""
    return tuple(sorted(set(_count_macs(net).values())))


@cache_on_net
def _list_frozen(net: Elastic, block: Block) -> frozenset[str]:
    groups = group_params(net)
    return frozenset().union(*groups[: block[0]], *groups[block[1] :])


@cache_on_net
def _count_macs(net: Elastic) -> dict[Block, float]:
    """Count the MACs per sample of a training step of each block, by running it."""
    blocks = combinations(range(len(group_params(net)) + 1), 2)
    return {
        block: count_training_macs(net, net.trainable_names - _list_frozen(net, block))
        for block in blocks
    }
