"""The classic exchange of split learning: activations up, gradients down, a step on both sides."""

import torch

from pliant.split.base import SplitEnvironment, SplitStepCost
from pliant.split.client import BatchRequest
from pliant.split.payload import Payload
from pliant.split.server import ServerPart
from pliant.split.session import Session


def start_batch(
    session: Session,
    environment: SplitEnvironment,
    client: int,
    position: tuple[int, int],
    *,
    lr: float,
) -> bool:
    """Start a client's mini-batch of a round and step; return whether the client stayed."""
    samples = session.batch_size(client, position[1])
    cost = session.device_step_cost(samples, session.device_net.full, is_trained=True)
    forward = SplitStepCost(cost.forward_macs, cost.forward_macs, samples)
    if not environment.compute(client, forward):
        return False
    if not session.is_dry:
        session.clients[client].request_batch(BatchRequest(*position, lr))
    return True


def exchange_batch(
    session: Session,
    environment: SplitEnvironment,
    server: ServerPart,
    client: int,
    step: int,
    *,
    lr: float,
    payload: Payload,
) -> None:
    """Train both sides on a started mini-batch, or neither if its message is rejected."""
    samples = session.batch_size(client, step)
    cost = session.device_step_cost(samples, session.device_net.full, is_trained=True)
    shape = (samples, *session.activation_shape)
    backward = SplitStepCost(cost.macs - cost.forward_macs, 0.0, 0)
    server_cost = session.server_step_cost(samples, needs_gradient=True)
    if session.is_dry:
        environment.send(client, None, shape, payload)
        environment.serve(client, server_cost)
        entries = torch.Size(shape).numel()
        size = payload.dense_size(entries)
        environment.send_gradient(client, size, dense=4 * entries, nonzero=4 * entries)
        environment.compute(client, backward)
        return
    part = session.clients[client]
    message = part.forward()
    if message is None:
        return
    batch = environment.send(client, message, shape, payload)
    if batch is None:
        part.skip()
        return
    environment.serve(client, server_cost)
    loss, gradient = server.step(client, *batch, lr, needs_gradient=True)
    assert gradient is not None
    body = payload.encode(gradient)
    # the authors of AdaSplit charge as much down as up
    nonzero = 4 * int(torch.count_nonzero(batch[0]))
    environment.send_gradient(client, len(body), dense=4 * gradient.numel(), nonzero=nonzero)
    environment.record_loss(client, loss)
    if environment.compute(client, backward):
        part.backward(body)
    else:
        part.skip()
