"""One round of split learning: each call lets clients or the server act, and charges the cost."""

from collections.abc import Callable, Collection, Mapping, Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pliant.params import Params, is_finite
from pliant.split.averaging import average_params
from pliant.split.base import ChargedEnvironment, SplitEnvironment
from pliant.split.client import DRY_MESSAGE, BatchRequest, sample_subnet
from pliant.split.message_log import MessageLog
from pliant.split.payload import Message, decode_labels, get_label_dtype
from pliant.split.server import LabelledActivations, ServerCopies, ServerPart, ServerStepResult
from pliant.split.session import Session
from pliant.split.validation import MessageManifest, decode_message

PartChange = Callable[[Params, list[int]], Params]  # of a part that these clients share
Variation = Callable[[LabelledActivations], LabelledActivations]


class OpenBatch(NamedTuple):
    """A mini-batch that a client has started."""

    client: int
    request: BatchRequest
    samples: int
    backward_macs: float
    is_trained: bool


class ReceivedBatch(NamedTuple):
    """A mini-batch whose activations the server has received."""

    batch: OpenBatch
    message: object
    decoded: LabelledActivations | None  # None in a dry run
    nonzero: int  # bytes


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
        # what the server was trained on, if a client may be refused for its part afterwards
        self._log = MessageLog() if session.shares_parts else None

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
        sides = session.get_sides(client)
        subnet = sample_subnet(sides.device_net, request, session.seed, client)
        forward, training = sides.count_device_macs(subnet)
        if not self._charged.compute(client, samples * forward, samples):
            return None
        session.clients[client].request_batch(request)
        self._charged.costs[client].requests += 1
        backward = samples * training - samples * forward
        return OpenBatch(client, request, samples, backward, is_trained)

    def finish_batch(
        self, batch: OpenBatch, server: ServerPart, *, needs_gradient: bool = True
    ) -> float | None:
        """Train both sides on a mini-batch; return the server's loss if it was trained.

        A client without a gradient, for instance of a rejected message, needs a local loss.
        """
        return self._finish([batch], server, needs_gradient=needs_gradient).get(batch.client)

    def finish_batches(
        self, batches: Sequence[OpenBatch | None], *, joined: bool, needs_gradient: bool = True
    ) -> dict[int, float]:
        """Train both sides on mini-batches one after another or joined; return losses by client."""
        started = [batch for batch in batches if batch is not None]
        losses: dict[int, float] = {}
        for group in [started] if joined else [[batch] for batch in started]:
            losses |= self._finish(group, self.session.server, needs_gradient=needs_gradient)
        return losses

    def _finish(
        self, batches: list[OpenBatch], server: ServerPart, *, needs_gradient: bool
    ) -> dict[int, float]:
        clients, received, present = self.session.clients, [], []
        for batch in batches:
            if batch.request.needs_activation:
                message = clients[batch.client].forward()
                if message is None:
                    continue  # the client has left
                accepted = self._receive(batch, message)
                received += [] if accepted is None else [accepted]
            present.append(batch)
        results = self._train_server(received, server, needs_gradient=needs_gradient)
        gradients = {
            message.batch.client: self._reply(message, results[message.batch.client][1])
            for message in received
            if needs_gradient
        }
        for batch in present:
            self._charged.costs[batch.client].requests += 1
            gradient = gradients.get(batch.client)
            is_trained = batch.is_trained and (gradient is not None or self.session.has_local_loss)
            if is_trained and self._charged.compute(batch.client, batch.backward_macs, 0):
                clients[batch.client].backward(gradient)
            else:
                clients[batch.client].skip()
        return {client: loss for client, (loss, _) in results.items()}

    def has_kept(self, client: int, step: int) -> bool:
        """Return whether the server keeps the activations of a client's mini-batch."""
        session = self.session
        return session.kept is not None and session.kept.has_all(
            client, session.list_images(client, self.number, step)
        )

    def keep_batches(self, batches: Sequence[OpenBatch | None]) -> None:
        """Let clients send mini-batches that the server keeps but does not train on yet."""
        for batch in batches:
            if batch is None:
                continue
            client = self.session.clients[batch.client]
            message = client.forward()
            if message is not None:  # else the client has left
                self._receive(batch, message)
                client.skip()

    def train_on_kept(
        self,
        images: Mapping[int, Tensor],
        lr: float,
        server: ServerPart | None = None,
        vary: Variation = lambda batch: batch,
    ) -> dict[int, float]:
        """Train the server once on kept activations of clients' images; return losses by client."""
        session, server = self.session, server or self.session.server
        for client, indices in images.items():
            costs = self._charged.costs[client]
            costs.add_pass(0.0, len(indices))  # visited, but not computed by the client
            costs.server += len(indices) * session.server_macs
        samples = sum(map(len, images.values()))
        self._charged.serve(list(images), samples * session.server_training_macs)
        if session.is_dry:
            return dict.fromkeys(images, 1.0)
        assert session.kept is not None
        batches = {client: vary(session.kept.get(client, rows)) for client, rows in images.items()}
        if len(batches) == 1:
            [(client, batch)] = batches.items()
            results = {client: server.step(client, *batch, lr, needs_gradient=False)}
        else:
            results = server.step_joined(batches, lr, needs_gradient=False)
        for client, (loss, _) in results.items():
            self._charged.costs[client].losses.append(loss)
        return {client: loss for client, (loss, _) in results.items()}

    def _receive(self, batch: OpenBatch, message: object) -> ReceivedBatch | None:
        """Charge a message and return what it holds; None if it is rejected."""
        session, client = self.session, batch.client
        payload, classes = session.payload, session.data.train.classes
        costs = self._charged.costs[client]
        shape = (batch.samples, *session.get_sides(client).activation_shape)
        label_size = batch.samples * np.dtype(get_label_dtype(classes)).itemsize
        dense_size = payload.dense_size(shape) + label_size
        size = message.size if isinstance(message, Message) else dense_size
        costs.up += size
        costs.uplinks += 1
        costs.tensors += 2  # activations and labels
        costs.dense += 4 * prod(shape)
        self._charged.upload(client, size)
        decoded, nonzero = None, 4 * prod(shape)
        if message is not DRY_MESSAGE:
            manifest = MessageManifest(
                client, shape, classes, session.get_client_classes(client), payload, self._max_abs
            )
            result = decode_message(message, manifest)
            if isinstance(result, str):
                costs.refused[result] += 1
                return None
            decoded, nonzero = result, 4 * int(torch.count_nonzero(result[0]))
        if session.kept is not None:
            images = session.list_images(client, self.number, batch.request.step)
            session.kept.put(client, images, decoded)
        costs.nonzero += nonzero
        return ReceivedBatch(batch, message, decoded, nonzero)

    def _train_server(
        self, received: list[ReceivedBatch], server: ServerPart, *, needs_gradient: bool
    ) -> dict[int, ServerStepResult]:
        """Train once on the received mini-batches; return losses and gradients by client."""
        if not received:
            return {}
        session, lr = self.session, received[0].batch.request.lr
        decoded = {r.batch.client: r.decoded for r in received if r.decoded is not None}
        results: dict[int, ServerStepResult] = {r.batch.client: (1.0, None) for r in received}
        if len(decoded) == 1:
            [(client, activations)] = decoded.items()
            results[client] = server.step(client, *activations, lr, needs_gradient=needs_gradient)
        elif decoded:
            results = server.step_joined(decoded, lr, needs_gradient=needs_gradient)
        if decoded and self._log is not None:
            messages = {r.batch.client: r.message for r in received}
            self._log.append(lr, {c: m for c, m in messages.items() if isinstance(m, Message)})
        for client in decoded:
            self._charged.costs[client].losses.append(results[client][0])
        macs = 0.0
        for batch in (r.batch for r in received):
            sides = session.get_sides(batch.client)
            self._charged.costs[batch.client].server += batch.samples * sides.server_macs
            training = 3 * sides.server_macs if needs_gradient else sides.server_training_macs
            macs += batch.samples * training
        self._charged.serve([r.batch.client for r in received], macs)
        return results

    def retrain_server(self, start: Mapping[str, Tensor], refused: Collection[int]) -> None:
        """Train the server again from the round's start, without what refused clients sent.

        Copies of its part need no such thing: each is trained by one client.
        """
        session = self.session
        if self._log is None or isinstance(session.server, ServerCopies):
            return
        if not self._log.clients.intersection(refused):
            return
        session.server.load_state_dict(start)
        for lr, messages in self._log:
            batches = {
                client: self._decode(message)
                for client, message in messages.items()
                if client not in refused
            }
            if len(batches) == 1:
                [(client, batch)] = batches.items()
                session.server.step(client, *batch, lr, needs_gradient=False)
            elif batches:
                session.server.step_joined(batches, lr, needs_gradient=False)

    def _decode(self, message: Message) -> LabelledActivations:
        """Decode a message that was valid when it came."""
        session = self.session
        activations = session.payload.decode(message.body, message.shape)
        return activations, decode_labels(message.labels, session.data.train.classes)

    def _reply(self, received: ReceivedBatch, gradient: Tensor | None) -> bytes:
        """Send a client the gradient of its activations, which a dry run does not have."""
        client, payload = received.batch.client, self.session.payload
        shape = (received.batch.samples, *self.session.get_sides(client).activation_shape)
        raw, message = bytes(payload.dense_size(shape)), received.message
        if gradient is not None and isinstance(message, Message):
            # of features that did not arrive, the client needs no gradient
            raw = payload.encode(gradient, payload.read_columns(message.body, shape))
        costs = self._charged.costs[client]
        costs.down += len(raw)
        costs.tensors += 1
        costs.dense += 4 * prod(shape)
        costs.nonzero += received.nonzero  # the authors of AdaSplit charge as much down as up
        self._charged.download(client, len(raw))
        return raw

    def transfer_part(self, sender: int, receiver: int) -> None:
        """Pass a client's part on to another client."""
        self._charge_transfer([sender], [receiver])
        clients = self.session.clients
        clients[receiver].load_params(clients[sender].params)

    def show_part(self, client: int) -> None:
        """Give all clients the part of one, for their evaluation; only control is charged."""
        session = self.session
        for other, part in session.clients.items():
            if other != client:
                part.load_params(session.clients[client].params)
            elif self.number + 1 < self.rounds:
                continue  # charged when the part moves on, in the next round
            self._charge_requests([other])
            self._charged.costs[other].shown += session.device_bytes

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
            costs[client].has_bad_part = True
            del parts[client]
        return parts

    def average_copies(self, clients: list[int], trim: float = 0.0) -> None:
        """Give the copies of the server's part, if there are any, the mean of these clients'."""
        server = self.session.server
        if isinstance(server, ServerCopies):
            copies = {client: server.get_copy(client).params for client in clients}
            mean = average_params(self.session, copies, trim) if copies else server.common.params
            server.load_params(mean)

    def average_networks(self, *, trim: float = 0.0) -> None:
        """Average both parts of clients whose cuts differ; send each client its part."""
        session, server = self.session, self.session.server
        assert isinstance(server, ServerCopies)
        parts, mean = self._collect_parts(), server.common.params
        if parts:
            self._charge_transfer(list(parts), self.environment.available_clients())
            networks = {
                client: session.assemble_params(client, server.get_copy(client).params)
                for client in parts
            }
            mean = average_params(session, networks, trim)
            for client, part in session.clients.items():
                names = session.get_sides(client).device_names
                part.load_params({name: mean[name.removeprefix("device.")] for name in names})
        server.load_params(mean)

    def slide_cuts(self, estimate_seconds: Callable[[int, float, int, int], float]) -> None:
        """Move the cut of each client to where a round takes it least time at its current speed."""
        session, sides, steps = self.session, self.session.sides, self.session.iterations
        batch = session.local.batch
        for client in self.clients:
            seconds = []
            for side in sides:
                message = session.payload.dense_size((batch, *side.activation_shape))
                size = steps * message + side.device_bytes  # as much down as up
                macs = steps * batch * side.device_training_macs
                seconds.append(estimate_seconds(client, macs, size, size))
            cut = seconds.index(min(seconds))
            if sides[cut] is not session.get_sides(client):
                size = session.move_cut(client, cut)
                self._charged.costs[client].down += size
                self._charge_requests([client])
                self._charged.download(client, size)

    def _charge_transfer(self, senders: list[int], receivers: list[int]) -> None:
        costs, sides = self._charged.costs, self.session.get_sides
        sizes = {client: sides(client).device_bytes for client in (*senders, *receivers)}
        for client in senders:
            costs[client].up += sizes[client]
            costs[client].relayed += sizes[client]
        for client in receivers:
            costs[client].down += sizes[client]
        self._charge_requests([*senders, *receivers])
        self._charged.transfer(senders, receivers, sizes)

    def _charge_requests(self, clients: list[int]) -> None:
        """Count a request with a whole part for each of these clients."""
        for client in clients:
            self._charged.costs[client].requests += 1
            tensors = len(self.session.get_sides(client).device_names)
            self._charged.costs[client].tensors += tensors
