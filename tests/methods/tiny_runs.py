"""A network with two weights, whose steps can be checked on paper, and single updates of a method.

The network has two filters a and b that each see the one pixel x; their outputs a·x and b·x are
the two logits. From a = b = 0, at lr 1 and with one sample of class 0, a step moves a by x/2 and b
by -x/2. A sample with x = 0 has no gradient.
"""

import torch
from torch import nn

from pliant.engine.worker_context import WorkerContext
from pliant.methods import LocalTraining
from pliant.methods.base import Step, Task, TaskKey
from pliant.methods.state import init_server_state
from pliant.nn.elastic import elastic
from pliant.nn.optimisers import Sgd
from pliant.params import get_params

PLAIN = LocalTraining(Sgd(lr=1.0))


def make_net():
    conv, identity = nn.Conv2d(1, 2, 1, bias=False), nn.Linear(2, 2, bias=False)
    nn.init.zeros_(conv.weight)
    with torch.no_grad():
        identity.weight.copy_(torch.eye(2))
    identity.requires_grad_(False)
    return elastic(nn.Sequential(conv, nn.Flatten(), identity), torch.zeros(1, 1, 1, 1))


def make_context(net, method):
    """Resolve what a method leaves out; there is no data."""
    return WorkerContext(net, None, method)


def make_state(net, method):
    return init_server_state(method, get_params(net.module))


def get_weights(state):
    """Return a and b."""
    return state.params["0.weight"].flatten().tolist()


def make_batch(x, label=0, samples=1):
    return torch.full((samples, 1, 1, 1), float(x)), torch.full((samples,), label)


def make_update(
    method,
    net,
    state,
    device,
    batches,
    *,
    row=0,
    rows=None,
    round=0,
    device_state=None,
    num_samples=1,
    classes=(0, 1),
):
    """Train a device on batches of (x, y) and return its update; `rows` has one per step."""
    rows, context = rows or [row] * len(batches), make_context(net, method)
    key, lr = TaskKey(0, round, device), method.local.optimiser.lr
    packed, extra = context.subnet_to_send(rows[0], key), context.broadcast(state)
    params = state.params if packed is None else net.take(state.params, packed)
    task = Task(key, params, lr, packed, extra, device_state, num_samples, classes)
    steps = []
    for number, ((x, y), row) in enumerate(zip(batches, rows, strict=bool(batches))):
        subnet = context.select_subnet(row, key, number)
        macs = len(y) * net.macs(subnet, training=True)
        steps.append(Step(x, y, subnet, macs, row=row))
    return context.train(task, steps)


def make_unpacked_update(method, net, state, device, batches, *, row, round=0):
    """Train the same steps in the full network."""
    key, context = TaskKey(0, round, device), make_context(net, method)
    extra = context.broadcast(state)
    task = Task(key, state.params, method.local.optimiser.lr, extra=extra)
    steps = [
        Step(x, y, context.select_subnet(row, key, number), 1.0, row=row)
        for number, (x, y) in enumerate(batches)
    ]
    return context.train(task, steps)


def get_last_row(method, net):
    return len(make_context(net, method).budget_policy.rows.shares) - 1
