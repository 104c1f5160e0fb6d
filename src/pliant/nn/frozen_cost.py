"""Layers that a training step may leave frozen, and what it costs then."""

import copy
from collections.abc import Set as AbstractSet

import torch
from torch.utils.flop_counter import FlopCounterMode

from pliant.nn.elastic import Elastic
from pliant.nn.net_cache import cache_on_net


@cache_on_net
def group_params(net: Elastic) -> tuple[frozenset[str], ...]:
    """Group the parameters by layer, in order; those of a norm belong to the layer before it.

    >>> import torch
    >>> import pliant as pl
    >>> net = pl.elastic(pl.models.digits_cnn_bn(), torch.zeros(1, 1, 28, 28))
    >>> sorted(group_params(net)[0])
    ['features.0.weight', 'features.1.bias', 'features.1.weight']
    """
    weights = {cost.layer for cost in net.program.layer_costs}
    groups: list[set[str]] = []
    for name, _ in net.module.named_parameters():
        if name in weights or not groups:
            groups.append(set())
        groups[-1].add(name)
    return tuple(map(frozenset, groups))


@cache_on_net
def count_unfrozen_macs(net: Elastic, frozen: frozenset[str]) -> float:
    """Count the MACs per sample of a training step that leaves these parameters as they are."""
    return count_training_macs(net, net.trainable_names - frozen)


def count_training_macs(net: Elastic, trained: AbstractSet[str]) -> float:
    """Count the MACs per sample of a training step of these parameters, by running one.

    >>> import torch
    >>> import pliant as pl
    >>> from pliant.nn.frozen_cost import count_training_macs
    >>> net = pl.elastic(pl.models.digits_cnn(), torch.zeros(1, 1, 28, 28))
    >>> count_training_macs(net, net.trainable_names) == net.macs(net.full, training=True)
    True
    """
    module = copy.deepcopy(net.module).train()
    for name, param in module.named_parameters():
        param.requires_grad_(name in trained)
    samples = 2  # batch norm needs two
    inputs = [torch.zeros(samples, *shape) for shape in net.program.input_shapes]
    with FlopCounterMode(display=False) as counter:
        module(*inputs).sum().backward()
    return float(counter.get_total_flops()) / (2 * samples)
