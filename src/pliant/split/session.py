"""The state of a split run: both sides of the cut, the clients' parts and their data."""

from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from pliant.data import Batches, FederatedData, make_batches
from pliant.devices import Fleet
from pliant.devices.vector_rng import FloatArray
from pliant.params import Params, get_params
from pliant.split.base import SplitTraining
from pliant.split.client import DryClient, LabelledBatch, LocalClient, LocalLoss, SplitClient
from pliant.split.client_module import reinitialise
from pliant.split.cut_sides import CutSides
from pliant.split.kept import KeptActivations, check_repeatable
from pliant.split.payload import Payload
from pliant.split.server import ServerCopies, ServerPart, SharedServer

CUTS_STATE = "cuts"  # in the method's state: the cuts of clients whose cut has moved
ClientFactory = Callable[[LocalClient], SplitClient]


class SplitSetup(Protocol):
    """A split method, as a session uses it."""

    @property
    def cut(self) -> str: ...

    @property
    def slide(self) -> tuple[str, ...]:
        """Return further cuts, among which that of each client moves."""

    @property
    def local(self) -> SplitTraining: ...

    @property
    def payload(self) -> Payload: ...

    @property
    def shares_parts(self) -> bool:
        """Return whether clients' parts are sent to the server, to be merged or passed on."""

    def make_head(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Make the head of a client's part for activations of this shape."""

    def set_up(self, session: "Session") -> ServerPart:
        """Make the session's clients; return the server's part."""


class Session:
    """Everything that a split method works with; a dry run computes nothing.

    Clients are in this process unless `make_client` replaces them, for example by remote ones. With
    `only_client` there is just that one, as on a device. `check` is that of `elastic`.
    """

    def __init__(
        self,
        method: SplitSetup,
        net: nn.Module,
        data: FederatedData,
        fleet: Fleet,
        seed: int,
        *,
        is_dry: bool = False,
        make_client: ClientFactory | None = None,
        only_client: int | None = None,
        check: bool = True,
    ) -> None:
        if fleet.size < len(data):
            raise ValueError(f"Expected a fleet of at least {len(data)} clients, got {fleet.size}")
        self.net, self.data, self.fleet = net, data, fleet
        self.seed, self.is_dry = seed, is_dry
        self.local, self.payload = method.local, method.payload
        self.shares_parts = method.shares_parts
        self._make_client, self._only_client = make_client, only_client
        self.sides = self._make_sides(method, check=check)
        first = self.sides[0]
        self.split_network, self.template = first.split_network, first.template
        self.activation_shape = first.activation_shape
        self.device_net, self.server_net = first.device_net, first.server_net
        self.device_macs, self.server_macs = first.device_macs, first.server_macs
        self.device_training_macs = first.device_training_macs
        self.server_training_macs = first.server_training_macs
        self.device_bytes = first.device_bytes
        self.clients: dict[int, SplitClient] = {}
        self.method_state: dict[str, Params] = {}  # kept between rounds
        self._client_classes: dict[int, frozenset[int]] = {}
        self.kept: KeptActivations | None = None  # by the server, if parts do not change
        self._cached_epoch = lru_cache(maxsize=4 * max(1, len(data)))(self._load_epoch)
        self._cached_order = lru_cache(maxsize=4 * max(1, len(data)))(self._draw_order)
        self.server = method.set_up(self)

    @property
    def iterations(self) -> int:
        """Return the mini-batches per round: those of the client with the most data."""
        return max(self.num_batches(client) for client in range(len(self.data)))

    @cached_property
    def round_macs(self) -> FloatArray:
        """Return the MACs of each client in a round of full mini-batches."""
        return self.count_round_macs()

    def count_round_macs(self) -> FloatArray:
        """Count the MACs of each client in a round, for clients that tell their sizes late."""
        clients, steps = range(len(self.data)), range(self.iterations)
        samples = [sum(self.batch_size(client, step) for step in steps) for client in clients]
        return np.array(samples, float) * self.device_training_macs

    def num_batches(self, client: int) -> int:
        """Return the mini-batches of one pass over a client's data."""
        return -(-self.data.count_samples(client) // self.local.batch)

    def load_batch(self, client: int, round: int, step: int) -> LabelledBatch:
        """Return a client's mini-batch; after its last one a new epoch starts."""
        epoch, index = divmod(step, self.num_batches(client))
        return self._cached_epoch(client, round, epoch)[index]

    def list_images(self, client: int, round: int, step: int) -> Tensor:
        """Return which of a client's images are in a mini-batch, counted from 0.

        Unlike the images themselves, the server knows this of devices with their own data too.
        """
        epoch, index = divmod(step, self.num_batches(client))
        order, size = self._cached_order(client, round, epoch), self.local.batch
        return order[index * size : (index + 1) * size]

    def batch_size(self, client: int, step: int) -> int:
        samples = self.data.count_samples(client)
        if not samples:
            return 0  # the client has not told yet how many it has
        index = step % self.num_batches(client)
        return min(self.local.batch, samples - index * self.local.batch)

    def _load_epoch(self, client: int, round: int, epoch: int) -> Batches:
        local, share = self.local, self.data.get_share(client)
        address = (self.seed, round, client, epoch)
        return make_batches(self.data.train, share, local.batch, *address, augment=local.augment)

    def _draw_order(self, client: int, round: int, epoch: int) -> Tensor:
        share = np.arange(self.data.count_samples(client))
        address = (self.seed, round, client, epoch)
        return make_batches(self.data.train, share, self.local.batch, *address).order

    def get_client_classes(self, client: int) -> frozenset[int]:
        """Return the classes that a client may have: its own, or all if it hides them."""
        if client not in self._client_classes:
            classes = self.data.list_classes(client) or range(self.data.train.classes)
            self._client_classes[client] = frozenset(classes)
        return self._client_classes[client]

    def _make_sides(self, method: SplitSetup, *, check: bool) -> list[CutSides]:
        """Cut the network at each of the method's cuts."""
        example, classes = self.data.make_example(), self.data.train.classes
        sides = [
            CutSides(
                self.net,
                example,
                cut,
                lambda shape: method.make_head(shape, classes),
                self.seed,
                check=check,
            )
            for cut in (method.cut, *method.slide)
        ]
        for number, cut in enumerate(method.slide, start=1):
            if not set(sides[0].device_names) < set(sides[number].device_names):
                raise ValueError(
                    f"Expected cuts with more layers on the device than {method.cut!r} in `slide`, "
                    f"got {cut!r}"
                )
        return sides

    def get_sides(self, client: int) -> CutSides:
        """Return the sides of a client's current cut."""
        return self.sides[self._get_cut(client)]

    def _get_cut(self, client: int) -> int:
        state = self.method_state.get(CUTS_STATE, {})
        return int(state[str(client)]) if str(client) in state else 0

    def move_cut(self, client: int, cut: int) -> int:
        """Cut a client's network elsewhere; return the bytes of layers that are new to it.

        Both sides start with new optimisers, so that none has to be sent.
        """
        old_bytes, server = self.get_sides(client).device_bytes, self.server
        assert isinstance(server, ServerCopies)
        params = self.assemble_params(client, server.effective_params(client))
        state = {**self.method_state.get(CUTS_STATE, {}), str(client): torch.tensor(cut)}
        self.method_state = {**self.method_state, CUTS_STATE: state}
        names = self.get_sides(client).device_names
        part = {name: params[name.removeprefix("device.")] for name in names}
        self.clients[client] = self._build_client(client, part)
        server.copies.pop(client, None)
        return max(0, self.get_sides(client).device_bytes - old_bytes)

    def make_clients(
        self,
        make_module: Callable[[int], nn.Module],
        local_loss: LocalLoss | None = None,
        *,
        trains_head: bool = True,
    ) -> None:
        """Make the clients with their parts and, if the method has one, their local loss."""
        self.has_local_loss, self.trains_head = local_loss is not None, trains_head
        self._local_loss = local_loss
        for number in range(len(self.data)) if self._only_client is None else [self._only_client]:
            self.clients[number] = self._build_client(number, get_params(make_module(number)))

    def _build_client(self, number: int, params: Params) -> SplitClient:
        client_class = DryClient if self.is_dry else LocalClient
        client = client_class(number, self, params, self._local_loss)
        return self._make_client(client) if self._make_client else client

    def keep_activations(self, limit: int) -> None:
        """Let the server keep what clients send, up to a number of bytes."""
        check_repeatable(self.split_network.device)
        data, shape = self.data, self.activation_shape
        self.kept = KeptActivations(lambda: self.method_state, data, shape, limit)

    def make_server(self, params: Params | None = None) -> SharedServer:
        """Make a server's part with the network's parameters or given ones."""
        params = get_params(self.split_network.server) if params is None else params
        return SharedServer(self.server_net, params, self.local.optimiser)

    def make_client_module(self, client: int) -> nn.Module:
        """Make a client's module with its own random weights."""
        return reinitialise(self.template, self.seed, "client", client)

    def assemble_params(self, client: int, server_params: Params) -> Params:
        """Return a client's full network: its own part and the server's."""
        device_params = {
            name.removeprefix("device."): tensor
            for name, tensor in self.clients[client].params.items()
            if name.startswith("device.")
        }
        return {**get_params(self.net), **device_params, **server_params}
