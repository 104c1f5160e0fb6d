"""Grow a network: filters that do not take part yet are silent."""

import torch

from pliant.nn.compiler.program import ChannelIndex
from pliant.nn.elastic import Elastic
from pliant.nn.subnet import Subnet
from pliant.params import Params


def silence_filters(net: Elastic, params: Params, subnet: Subnet) -> Params:
    """Return parameters with which the full network computes what the subnet computes.

    Every layer that reads a filter outside the subnet gets a weight of zero for it. Its own weights
    stay, so that it can learn as soon as it joins.

    >>> import torch
    >>> import pliant as pl
    >>> from pliant.nn.growth import silence_filters
    >>> net = pl.elastic(pl.models.digits_cnn(), torch.zeros(1, 1, 28, 28))
    >>> params = silence_filters(net, pl.get_params(net.module), net.select_prefix(0.5))
    >>> params["features.3.weight"].abs().sum((0, 2, 3)).count_nonzero()  # read by 6 of 12 filters
    tensor(6)
    """
    index = ChannelIndex(subnet, torch.device("cpu"), torch.float32)
    silenced = dict(params)
    for name, slicing in net.program.slicings.items():
        if name in params and len(slicing) > 1 and slicing[1] is not None:
            weight = params[name]
            is_read = torch.zeros(weight.shape[1], dtype=torch.bool)
            is_read[torch.from_numpy(index.positions(slicing[1]))] = True
            shape = (1, -1, *[1] * (weight.ndim - 2))
            silenced[name] = torch.where(is_read.view(shape), weight, 0.0)
    return silenced
