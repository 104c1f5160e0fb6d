"""A network with two weights, whose steps one can do on paper, and one round of a method.

The network has two filters a and b that each see the one pixel x; their outputs a·x and b·x are
the two logits. From a = b = 0, at lr 1 and with one sample of class 0, a step moves a by x/2 and b
by -x/2. A sample with x = 0 has no gradient.
"""

from dataclasses import replace

import torch
from torch import nn

from pliant.methods import Local
from pliant.methods.base import Place, State, Step, Task
from pliant.nn.elastic import elastic
from pliant.nn.optimiser import Sgd
from pliant.params import params_of

PLAIN = Local(Sgd(lr=1.0))


def two_weights():
    conv, read = nn.Conv2d(1, 2, 1, bias=False), nn.Linear(2, 2, bias=False)
    nn.init.zeros_(conv.weight)
    with torch.no_grad():
        read.weight.copy_(torch.eye(2))
    read.requires_grad_(False)
    return elastic(nn.Sequential(conv, nn.Flatten(), read), torch.zeros(1, 1, 1, 1))


def start(net):
    return State(params_of(net.net))


def weights(state):
    """Return a and b."""
    return state.params["0.weight"].flatten().tolist()


def pixel(x, label=0, samples=1):
    return torch.full((samples, 1, 1, 1), float(x)), torch.full((samples,), label)


def task_of(method, net, state, device, row, round=0, memory=(), owned=1, classes=(0, 1)):
    place = Place(0, round, device)
    packed = method.sends(net, row, place)
    params = state.params if packed is None else net.take(state.params, packed)
    lr = method.local.optimiser.lr
    return Task(place, params, lr, packed, state.sent, dict(memory), owned, classes)


def answer(method, net, state, device, batches, *, row=0, rows=None, round=0, **options):
    """Return a device's update: batches are (x, y); rows are those of its steps."""
    rows = rows or [row] * len(batches)
    task = task_of(method, net, state, device, rows[0], round, **options)
    steps = []
    for number, ((x, y), row) in enumerate(zip(batches, rows, strict=bool(batches))):
        subnet = method.subnet(net, row, task.place, number)
        steps.append(Step(x, y, subnet, len(y) * net.macs(subnet, training=True)))
    return method.train(net, task, steps)


def in_place(method, net, state, device, batches, *, row, round=0):
    """Train the same steps in the whole network."""
    place = Place(0, round, device)
    task = Task(place, state.params, method.local.optimiser.lr)
    steps = [
        Step(x, y, method.subnet(net, row, place, number), 1.0)
        for number, (x, y) in enumerate(batches)
    ]
    return method.train(net, replace(task, extra=state.sent), steps)


def last_row(method, net):
    return len(method.plan(net).rows.shares) - 1
