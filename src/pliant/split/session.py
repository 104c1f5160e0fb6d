"""A split run under way: the two sides of the cut, the clients' parts, their data."""

from collections.abc import Callable
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import nn

from pliant.data import Batches, Federated, batches
from pliant.devices.draws import FloatArray
from pliant.nn.cut import cut
from pliant.nn.elastic import elastic
from pliant.nn.subnet import Subnet
from pliant.params import Params, nbytes, params_of
from pliant.split.base import Local, Work
from pliant.split.client import Batch, Client, Here, Own
from pliant.split.head import Tapped, projection, redrawn
from pliant.split.part import Part
from pliant.split.payload import Payload
from pliant.split.server import Server

Settle = Callable[[Here], Client]  # where a client's part is from now on


class Session:
    """Everything that a split method works with; in a dry run nothing is computed.

    Clients are in this process unless `settle` puts them elsewhere; a device has only itself.
    """

    def __init__(
        self,
        net: nn.Module,
        data: Federated,
        local: Local,
        after: str,
        *,
        seed: int,
        has_head: bool = False,
        is_dry: bool = False,
        settle: Settle | None = None,
        only: int | None = None,
    ) -> None:
        example = data.train.normalised(slice(0, 1))
        self.net, self.data, self.local = net, data, local
        self.seed, self.is_dry = seed, is_dry
        self._settle, self._only = settle, only
        self.cut = cut(net, example, after)
        if len(self.cut.place.shapes) != 1:
            raise ValueError(
                f"Expected a cut that one value crosses, got {len(self.cut.place.shapes)} "
                f"after {after!r} (`pliant inspect --cuts` lists all)"
            )
        self.shape = self.cut.place.shapes[0]
        with torch.random.fork_rng(devices=[]):  # modules draw weights as they are made
            torch.manual_seed(0)
            head = projection(self.shape) if has_head else nn.Identity()
        self.template = Tapped(self.cut.device, redrawn(head, seed, "head"))
        self.device = elastic(self.template, example)
        self.server_net = elastic(self.cut.server, torch.zeros(1, *self.shape))
        self.device_macs = self.device.macs(self.device.full)
        self.device_training = self.device.macs(self.device.full, training=True)
        self.server_macs = self.server_net.macs(self.server_net.full)
        self.server_training = self.server_net.macs(self.server_net.full, training=True)
        self.clients: dict[int, Client] = {}
        self.server: Server | None = None
        self.notes: dict[str, Params] = {}  # what else a method keeps between rounds
        self._pass_of = lru_cache(maxsize=4 * max(1, len(data)))(self._pass)

    # the clients' data

    @property
    def iterations(self) -> int:
        """Return the mini-batches of a round: those of the client that has most."""
        return max(self.count(client) for client in range(len(self.data)))

    @cached_property
    def visits(self) -> FloatArray:
        """Return how many samples each client goes through in a round."""
        clients, steps = range(len(self.data)), range(self.iterations)
        return np.array(
            [sum(self.size(client, step) for step in steps) for client in clients], float
        )

    def count(self, client: int) -> int:
        """Return how many mini-batches one pass over a client's data has."""
        return -(-len(self.data.devices[client]) // self.local.batch)

    def batch(self, client: int, round: int, step: int) -> Batch:
        """Return a client's mini-batch; one that is through begins again."""
        epoch, place = divmod(step, self.count(client))
        return self._pass_of(client, round, epoch)[place]

    def size(self, client: int, step: int) -> int:
        """Return how many samples a mini-batch has."""
        owned, place = len(self.data.devices[client]), step % self.count(client)
        return min(self.local.batch, owned - place * self.local.batch)

    def _pass(self, client: int, round: int, epoch: int) -> Batches:
        share = self.data.devices[client]
        return batches(self.data.train, share, self.local.batch, self.seed, round, client, epoch)

    # the clients' parts

    @cached_property
    def owned(self) -> list[frozenset[int]]:
        """Return the classes that each client has."""
        labels = self.data.train.labels.numpy()
        return [frozenset(np.unique(labels[share]).tolist()) for share in self.data.devices]

    def join(
        self, made: Callable[[int], nn.Module], payload: Payload, own: Own | None = None
    ) -> None:
        """Give every client its part, and a loss of its own where the method has one."""
        for client in range(len(self.data)) if self._only is None else [self._only]:
            here = Here(
                client,
                Part(self.device, params_of(made(client)), self.local.optimiser),
                self.batch,
                seed=self.seed,
                payload=payload,
                classes=self.data.train.classes,
                own=own,
            )
            self.clients[client] = here if self._settle is None else self._settle(here)

    @property
    def served(self) -> Server:
        """Return the server's part, which a method makes when it begins."""
        assert self.server is not None
        return self.server

    def redrawn(self, client: int) -> nn.Module:
        """Return a client's module with weights of its own."""
        return redrawn(self.template, self.seed, "client", client)

    # costs

    def device_work(self, samples: int, subnet: Subnet, *, trains: bool) -> Work:
        """Return what a mini-batch costs a client."""
        if subnet is self.device.full:
            forward, training = self.device_macs, self.device_training
        else:
            forward = self.device.macs(subnet)
            training = self.device.macs(subnet, training=True)
        macs = training if trains else forward
        return Work(samples * macs, samples * forward, samples)

    def server_work(self, samples: int, *, back: bool) -> Work:
        """Return what a mini-batch costs the server."""
        macs = 3 * self.server_macs if back else self.server_training
        return Work(samples * macs, samples * self.server_macs, samples)

    # the whole network

    def joined(self, client: int, server: Params) -> Params:
        """Return the whole network of a client: its own part and what it is served with."""
        own = self.clients[client].params
        device = {
            name.removeprefix("device."): tensor
            for name, tensor in own.items()
            if name.startswith("device.")
        }
        return {**params_of(self.net), **device, **server}

    @cached_property
    def device_bytes(self) -> int:
        """Return the bytes of a client's part with its head."""
        return nbytes(params_of(self.template))
