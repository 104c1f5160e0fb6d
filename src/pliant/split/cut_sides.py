"""Both sides of a cut: the parts of the network, their costs, and what crosses."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from pliant.nn.cut import split_network
from pliant.nn.elastic import elastic
from pliant.nn.subnet import Subnet
from pliant.params import get_params, nbytes
from pliant.split.client_module import ClientModule, reinitialise


class CutSides:
    """A network cut after a layer; the client's part gets a head for activations of its shape."""

    def __init__(
        self,
        net: nn.Module,
        example: Tensor,
        cut: str,
        make_head: Callable[[tuple[int, ...]], nn.Module],
        seed: int,
        *,
        check: bool,  # as for `elastic`
    ) -> None:
        self.split_network = split_network(net, example, cut)
        shapes = self.split_network.cut_point.shapes
        if len(shapes) != 1:
            raise ValueError(
                f"Expected a cut with one activation, got {len(shapes)} after {cut!r} "
                "(list all cuts with `pliant inspect --cuts`)"
            )
        self.activation_shape = shapes[0]
        with torch.random.fork_rng(devices=[]):  # new modules draw random weights
            torch.manual_seed(0)
            head = make_head(self.activation_shape)
        self.template = ClientModule(self.split_network.device, reinitialise(head, seed, "head"))
        activation = torch.zeros(1, *self.activation_shape)
        self.device_net = elastic(self.template, example, check=check)
        self.server_net = elastic(self.split_network.server, activation, check=check)
        self.device_macs = self.device_net.macs(self.device_net.full)
        self.device_training_macs = self.device_net.macs(self.device_net.full, training=True)
        self.server_macs = self.server_net.macs(self.server_net.full)
        self.server_training_macs = self.server_net.macs(self.server_net.full, training=True)
        params = get_params(self.template)
        self.device_names, self.device_bytes = list(params), nbytes(params)

    def count_device_macs(self, subnet: Subnet) -> tuple[float, float]:
        """Return a client's MACs per sample: of the forward pass, and of both passes."""
        if subnet is self.device_net.full:
            return self.device_macs, self.device_training_macs
        return self.device_net.macs(subnet), self.device_net.macs(subnet, training=True)
