"""The classic exchange of split learning: activations up, gradients down, a step on both sides."""

import torch

from pliant.split.base import Floor, Work
from pliant.split.payload import Payload
from pliant.split.server import Server
from pliant.split.session import Session


def exchange(
    session: Session,
    floor: Floor,
    server: Server,
    client: int,
    place: tuple[int, int],  # round and step
    *,
    lr: float,
    payload: Payload,
) -> None:
    """Train both sides on one mini-batch of a client; what is refused trains neither."""
    number, step = place
    full = session.device.full
    samples = session.size(client, step)
    work = session.device_work(samples, full, trains=True)
    shape = (samples, *session.shape)
    if not floor.compute(client, Work(work.forward, work.forward, samples)):
        return
    backward = Work(work.macs - work.forward, 0.0, 0)
    served = session.server_work(samples, back=True)
    if session.is_dry:
        floor.send(client, None, shape, payload)
        floor.serve(client, served)
        entries = torch.Size(shape).numel()
        size = payload.dense(entries)
        floor.give_back(client, size, dense=4 * entries, nonzero=4 * entries)
        floor.compute(client, backward)
        return
    x, y = session.batch(client, number, step)
    part = session.clients[client]
    done = part.run(full, x)
    activation = done.output[1]
    got = floor.send(client, session.message(activation, y, payload), shape, payload)
    if got is None:
        return
    floor.serve(client, served)
    loss, slope = server.step(client, *got, lr, back=True)
    assert slope is not None
    body = payload.encode(slope)
    # the authors of AdaSplit charge as much down as up
    nonzero = 4 * int(torch.count_nonzero(got[0]))
    floor.give_back(client, len(body), dense=4 * slope.numel(), nonzero=nonzero)
    floor.note(client, loss)
    if not floor.compute(client, backward):
        return
    felt = (activation * payload.decode(body, shape)).sum()
    grads = torch.autograd.grad(felt, list(done.leaves.values()), allow_unused=True)
    part.descend(done, grads, lr)
