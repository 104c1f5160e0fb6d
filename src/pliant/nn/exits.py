"""Networks with exits: a classifier after each stage, so that the depth can be chosen."""

import copy
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from pliant.nn.elastic import Elastic, elastic
from pliant.nn.net_cache import cache_on_net


class ExitNetwork(nn.Module):
    """Stages that follow one another, each with an exit that classifies what it returns.

    It is used at full depth, with the last exit. `select_depth` makes shallower networks of it.

    >>> import torch
    >>> from torch import nn
    >>> import pliant as pl
    >>> stages = [nn.Conv2d(1, 4, 3), nn.Conv2d(4, 8, 3)]
    >>> exits = [nn.Sequential(nn.Flatten(), nn.Linear(size, 2)) for size in (144, 128)]
    >>> pl.ExitNetwork(stages, exits)(torch.zeros(5, 1, 8, 8)).shape
    torch.Size([5, 2])
    """

    def __init__(self, stages: Sequence[nn.Module], exits: Sequence[nn.Module]) -> None:
        super().__init__()
        if not stages or len(stages) != len(exits):
            raise ValueError(
                f"Expected one exit for each stage, got {len(stages)} stages, {len(exits)} exits"
            )
        self.stages, self.exits = nn.ModuleList(stages), nn.ModuleList(exits)
        self.depth = len(stages)
        self.all_exits = False  # return the output of every exit on the way

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        outputs = []
        for number in range(self.depth):
            x = self.stages[number](x)
            if self.all_exits or number == self.depth - 1:
                outputs.append(self.exits[number](x))
        return tuple(outputs) if self.all_exits else outputs[0]


def count_exits(net: Elastic) -> int:
    """Return the number of exits; refuse a network that has none."""
    if not isinstance(net.module, ExitNetwork):
        kind = type(net.module).__name__
        raise ValueError(f"Expected a network with exits (pliant.ExitNetwork), got a {kind}")
    return len(net.module.exits)


@cache_on_net
def select_depth(net: Elastic, depth: int, all_exits: bool = False) -> Elastic:
    """Return the network of the first stages, with the same parameters.

    Its output is that of its last exit or, with `all_exits`, a tuple with the outputs of all.
    """
    if depth == count_exits(net) and not all_exits:
        return net
    module = cast(ExitNetwork, copy.copy(net.module))  # with the same layers
    module.depth, module.all_exits = depth, all_exits
    inputs = tuple(torch.zeros(1, *shape) for shape in net.program.input_shapes)
    return elastic(module, inputs, check=False)
