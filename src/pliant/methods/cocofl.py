"""CoCoFL without quantisation: each device trains a random block of layers and freezes the others.

Pfeiffer et al., "CoCoFL: Communication- and computation-aware federated learning via partial NN
freezing and quantization", TMLR 2023.
"""

import copy
from collections.abc import Iterable
from itertools import accumulate
from typing import ClassVar

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

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
from pliant.nn.elastic import Elastic, cache_on_net
from pliant.nn.trainer import SubnetTrainer
from pliant.value import Positive, Value


class CoCoFl(Value, frozen=True, tag="cocofl"):
    """Train as many consecutive layers as fit at the start of the round; where is random.

    The forward pass runs through the whole network, and so does the gradient from the loss to the
    block. A layer that a device froze counts as unchanged in the mean. Frozen layers are charged to
    the upload although they need not be sent.

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
        return PerRound(CostRows(tuple(cost / full for cost in _bound_macs(net))), self.margin)

    def macs(self, net: Elastic, row: int, key: TaskKey, step: int) -> float:
        return _count_macs(net, _draw_block(net, row, key))

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
    """Draw a block of row + 1 layers, the same for the whole round."""
    length = row + 1
    last_start = len(_group_params(net)) - length
    start = int(key.rng_stream("block").integers(last_start + 1))
    return start, start + length


@cache_on_net
def _bound_macs(net: Elastic) -> tuple[float, ...]:
    """Return the most that a block of 1, 2, … layers may cost per sample."""
    layers = len(_group_params(net))
    dearest = [
        max(_count_macs(net, (start, start + length)) for start in range(layers - length + 1))
        for length in range(1, layers + 1)
    ]
    return tuple(accumulate(dearest, max))


@cache_on_net
def _group_params(net: Elastic) -> tuple[frozenset[str], ...]:
    """Return the parameters of each layer; those of a norm belong to the layer before it."""
    weights = {cost.layer for cost in net.program.layer_costs}
    groups: list[set[str]] = []
    for name, _ in net.module.named_parameters():
        if name in weights or not groups:
            groups.append(set())
        groups[-1].add(name)
    return tuple(map(frozenset, groups))


@cache_on_net
def _list_frozen(net: Elastic, block: Block) -> frozenset[str]:
    groups = _group_params(net)
    return frozenset().union(*groups[: block[0]], *groups[block[1] :])


@cache_on_net
def _count_macs(net: Elastic, block: Block) -> float:
    """Count the MACs per sample of a training step, by running one with the others frozen."""
    module = copy.deepcopy(net.module).train()
    frozen, samples = _list_frozen(net, block), 2  # batch norm needs two
    for name, param in module.named_parameters():
        param.requires_grad_(name not in frozen and name in net.trainable_names)
    inputs = [torch.zeros(samples, *shape) for shape in net.program.input_shapes]
    with FlopCounterMode(display=False) as counter:
        module(*inputs).sum().backward()
    return float(counter.get_total_flops()) / (2 * samples)
