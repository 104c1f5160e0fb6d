"""The classic exchange of split learning: activations up, gradients down, a step on both sides."""

import torch

from pliant.split.base import Floor, Work
from pliant.split.client import Turn
from pliant.split.payload import Payload
from pliant.split.server import Server
from pliant.split.session import Session


def opened(
    session: Session, floor: Floor, client: int, place: tuple[int, int], *, lr: float
) -> bool:
    """Let a client begin a mini-batch of a round and a step; tell whether it has."""
    samples = session.size(client, place[1])
    work = session.device_work(samples, session.device.full, trains=True)
    if not floor.compute(client, Work(work.forward, work.forward, samples)):
        return False
    if not session.is_dry:
        session.clients[client].ask(Turn(*place, lr))
    return True


def exchange(
    session: Session,
    floor: Floor,
    server: Server,
    client: int,
    step: int,
    *,
    lr: float,
    payload: Payload,
) -> None:
    """Train both sides on a mini-batch that a client has begun; refused, it trains neither."""
    samples = session.size(client, step)
    work = session.device_work(samples, session.device.full, trains=True)
    shape = (samples, *session.shape)
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
    device = session.clients[client]
    message = device.message()
    if message is None:
        return
    got = floor.send(client, message, shape, payload)
    if got is None:
        device.drop()
        return
    floor.serve(client, served)
    loss, slope = server.step(client, *got, lr, back=True)
    assert slope is not None
    body = payload.encode(slope)
    # the authors of AdaSplit charge as much down as up
    nonzero = 4 * int(torch.count_nonzero(got[0]))
    floor.give_back(client, len(body), dense=4 * slope.numel(), nonzero=nonzero)
    floor.note(client, loss)
    if floor.compute(client, backward):
        device.learn(body)
    else:
        device.drop()
