"""One round of split learning: each call lets clients or the server act, and charges the cost."""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import torch

from pliant.params import Params, compute_trimmed_mean, is_finite, normalise_weights, weighted_sum
from pliant.split.base import ChargedEnvironment, SplitEnvironment
from pliant.split.client import DRY_MESSAGE, BatchRequest, sample_subnet
from pliant.split.payload import Message, get_label_dtype
from pliant.split.server import ServerCopies, ServerPart
from pliant.split.session import Session
from pliant.split.validation import MessageManifest, decode_message

PartChange = Callable[[Params, list[int]], Params]  # of a part that these clients share


class OpenBatch(NamedTuple):
    """A mini-batch that a client has started."""

    client: int
    request: BatchRequest
    samples: int
    backward_macs: float
    is_trained: bool


class SplitRound:
    """Round `number` of `rounds`, as a method sees it.

    A method acts only through these calls, so that nothing is done without being charged.
    """

    def __init__(
        self,
        session: Session,
        environment: ChargedEnvironment,
        number: int,
        rounds: int,
        *,
        max_abs: float,  # bound on activations
        clients: Sequence[int] | None = None,  # selected for this round; None: all
    ) -> None:
        self.clients = range(len(session.data)) if clients is None else clients
        self.session, self.number, self.rounds = session, number, rounds
        self.environment: SplitEnvironment = environment
        self._charged, self._max_abs = environment, max_abs

    def start_batch(
        self,
        client: int,
        step: int,
        lr: float,
        *,
        rates: tuple[float, ...] = (),
        needs_activation: bool = True,
        is_trained: bool = True,
    ) -> OpenBatch | None:
        """Start a client's mini-batch; return None if the client leaves meanwhile."""
        session = self.session
        samples = session.batch_size(client, step)
        request = BatchRequest(self.number, step, lr, rates, needs_activation)
        subnet = sample_subnet(session.device_net, request, session.seed, client)
        forward, training = session.count_device_macs(subnet)
        if not self._charged.compute(client, samples * forward, samples):
            return None
        session.clients[client].request_batch(request)
        backward = samples * training - samples * forward
        return OpenBatch(client, request, samples, backward, is_trained)

    def finish_batch(
        self, batch: OpenBatch, server: ServerPart, *, needs_gradient: bool = True
    ) -> float | None:
        """Train both sides on a mini-batch; return the server's loss if it was trained.

        A client without a gradient, for instance of a rejected message, needs a local loss.
        """
        part, loss, gradient = self.session.clients[batch.client], None, None
        if batch.request.needs_activation:
            message = part.forward()
            if message is None:
                return None  # the client has left
            loss, gradient = self._train_server(
                batch, message, server, needs_gradient=needs_gradient
            )
        is_trained = batch.is_trained and (gradient is not None or self.session.has_local_loss)
        if is_trained and self._charged.compute(batch.client, batch.backward_macs, 0):
            part.backward(gradient)
        else:
            part.skip()
        return loss

    def has_kept(self, client: int, step: int) -> bool:
        """Return whether the server keeps the activations of a client's mini-batch."""
        session = self.session
        return session.kept is not None and session.kept.has_all(
            client, session.list_images(client, self.number, step)
        )

    def train_on_kept(self, client: int, step: int, lr: float) -> float:
        """Train the server on kept activations; return its loss."""
        session, costs = self.session, self._charged.costs[client]
        images = session.list_images(client, self.number, step)
        costs.add_pass(0.0, len(images))  # an image is visited, but not computed by the client
        costs.server += len(images) * session.server_macs
        self._charged.serve(client, len(images) * session.server_training_macs)
        if session.is_dry:
            return 1.0
        assert session.kept is not None
        batch = session.kept.get(client, images)
        loss, _ = session.server.step(client, *batch, lr, needs_gradient=False)
        costs.losses.append(loss)
        return loss

    def _train_server(
        self, batch: OpenBatch, message: object, server: ServerPart, *, needs_gradient: bool
    ) -> tuple[float | None, bytes | None]:
        """Return the loss and the encoded gradient; neither if the message is rejected."""
        session, client = self.session, batch.client
        payload, classes = session.payload, session.data.train.classes
        costs = self._charged.costs[client]
        shape = (batch.samples, *session.activation_shape)
        dense, dense_size = 4 * prod(shape), payload.dense_size(prod(shape))
        label_size = batch.samples * np.dtype(get_label_dtype(classes)).itemsize
        size = message.size if isinstance(message, Message) else dense_size + label_size
        costs.up += size
        costs.uplinks += 1
        costs.dense += dense
        self._charged.upload(client, size)
        loss, gradient, nonzero = 1.0, None, dense
        batch_to_keep = None
        if message is DRY_MESSAGE:
            gradient = bytes(dense_size) if needs_gradient else None
        else:
            manifest = MessageManifest(
                client, shape, classes, session.get_client_classes(client), payload, self._max_abs
            )
            decoded = decode_message(message, manifest)
            if isinstance(decoded, str):
                costs.refused[decoded] += 1
                return None, None
            nonzero, batch_to_keep = 4 * int(torch.count_nonzero(decoded[0])), decoded
            lr = batch.request.lr
            loss, grad = server.step(client, *decoded, lr, needs_gradient=needs_gradient)
            gradient = None if grad is None else payload.encode(grad)
            costs.losses.append(loss)
        if session.kept is not None:
            images = session.list_images(client, self.number, batch.request.step)
            session.kept.put(client, images, batch_to_keep)
        costs.nonzero += nonzero
        macs = 3 * session.server_macs if needs_gradient else session.server_training_macs
        costs.server += batch.samples * session.server_macs
        self._charged.serve(client, batch.samples * macs)
        if gradient is not None:
            costs.down += len(gradient)
            costs.dense += dense
            costs.nonzero += nonzero  # the authors of AdaSplit charge as much down as up
            self._charged.download(client, len(gradient))
        return loss, gradient

    def transfer_part(self, sender: int, receiver: int) -> None:
        """Pass a client's part on to another client."""
        self._charge_transfer([sender], [receiver])
        clients = self.session.clients
        clients[receiver].load_params(clients[sender].params)

    def show_part(self, client: int) -> None:
        """Give all clients the part of one, free of charge, for their evaluation."""
        for other, part in self.session.clients.items():
            if other != client:
                part.load_params(self.session.clients[client].params)

    def average_parts(self, change: PartChange | None = None, *, trim: float = 0.0) -> list[int]:
        """Give all clients the mean of the parts of available clients; return whose parts entered.

        The part of a client that was not trained, or whose messages were all refused, does not.
        The server may change the mean before it sends it. `trim` is that of `average_params`.
        """
        parts = self._collect_parts()
        if parts:
            self._charge_transfer(list(parts), self.environment.available_clients())
            mean = average_params(self.session, parts, trim)
            if change is not None:
                mean = change(mean, list(parts))
            for part in self.session.clients.values():
                part.load_params(mean)
        return list(parts)

    def change_parts(self, change: PartChange) -> None:
        """Let the server change the part of each available client separately."""
        for client, params in self._collect_parts().items():
            self._charge_transfer([client], [client])
            self.session.clients[client].load_params(change(params, [client]))

    def _collect_parts(self) -> dict[int, Params]:
        clients, available = self.session.clients, self.environment.available_clients
        costs = self._charged.costs
        trained = [c for c in available() if costs[c].steps and not costs[c].is_rejected]
        parts = {client: clients[client].params for client in trained}
        # a client may leave, or turn out to have a bad part, while its part is fetched
        present = set(available())
        parts = {c: parts[c] for c in parts if c in present and not costs[c].is_rejected}
        for client in [client for client in parts if not is_finite(parts[client])]:
            reason = f"client {client}: expected a part of finite numbers"
            costs[client].refused[reason] += 1
            del parts[client]
        return parts

    def average_copies(self, clients: list[int], trim: float = 0.0) -> None:
        """Give the copies of the server's part, if there are any, the mean of these clients'."""
        server = self.session.server
        if isinstance(server, ServerCopies):
            copies = {client: server.get_copy(client).params for client in clients}
            mean = average_params(self.session, copies, trim) if copies else server.common.params
            server.load_params(mean)

    def _charge_transfer(self, senders: list[int], receivers: list[int]) -> None:
        size, costs = self.session.device_bytes, self._charged.costs
        for client in senders:
            costs[client].up += size
            costs[client].relayed += size
        for client in receivers:
            costs[client].down += size
        self._charged.transfer(senders, receivers, size)


def average_params(session: Session, params: Mapping[int, Params], trim: float = 0.0) -> Params:
    """Average the parameters of clients, weighted by their numbers of samples.

    With `trim`, average each coordinate without weights, after leaving out this share at both ends;
    one half gives the median.
    """
    if trim:
        return _trim_params(list(params.values()), trim)
    sizes = [float(session.data.count_samples(client)) for client in params]
    mean = weighted_sum(zip(normalise_weights(sizes), params.values(), strict=True))
    first = next(iter(params.values()))
    return {
        name: (mean[name] if tensor.is_floating_point() else mean[name].round()).to(tensor.dtype)
        for name, tensor in first.items()
    }


def _trim_params(params: list[Params], trim: float) -> Params:
    merged = {}
    for name, tensor in params[0].items():
        values = torch.stack([part[name].to(torch.float64) for part in params])
        mean = compute_trimmed_mean(values, torch.ones_like(values, dtype=torch.bool), trim)
        merged[name] = (mean if tensor.is_floating_point() else mean.round()).to(tensor.dtype)
    return merged
