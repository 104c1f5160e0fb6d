"""The cost of a training step in which some layers are frozen."""

import copy
from collections.abc import Set as AbstractSet

import torch
from torch.utils.flop_counter import FlopCounterMode

from pliant.nn.elastic import Elastic


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
