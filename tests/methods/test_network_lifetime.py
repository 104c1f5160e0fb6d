"""Nothing keeps a network alive after its last user has dropped it."""

import gc
import weakref
from typing import get_args

import pytest
import torch
from tests.methods.tiny_runs import make_context
from torch import nn

from pliant.methods import AnyMethod, Coherent, Distreal, FedDropout
from pliant.methods.base import Step, Task, TaskKey
from pliant.methods.verbs import SharesPredictions, TrainsPart
from pliant.nn.elastic import elastic
from pliant.nn.models import exit_cnn
from pliant.nn.pareto_table import uniform_table
from pliant.params import get_params

METHODS = [
    *(method() for method in get_args(AnyMethod) if not isinstance(method(), SharesPredictions)),
    Distreal(filters="round"),
    Coherent(filters="prefix"),
    FedDropout(masks="round"),
]


def train_once(method):
    module = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    if isinstance(method, TrainsPart):
        module = exit_cnn(2, filters=(4, 4), channels=1)
    net = elastic(module, torch.zeros(1, 1, 8, 8))
    uniform_table(net, rows=3)
    context = make_context(net, method)
    assert context.budget_policy is not None
    key = TaskKey(seed=0, round=0, device=0)
    x, y = torch.zeros(2, 1, 8, 8), torch.tensor([0, 1])
    subnet = context.select_subnet(0, key, 0)
    sent = context.subnet_to_send(0, key)
    params = get_params(module)
    task = Task(key, params if sent is None else net.take(params, sent), 0.1, sent, num_samples=2)
    context.train(task, [Step(x, y, subnet, net.macs(subnet, training=True))])
    return weakref.ref(net)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_trained_networks_are_all_freed(method):
    gc.freeze()  # only new objects are searched
    networks = [train_once(method) for _ in range(2)]  # a cache may keep the last one only
    gc.collect()
    assert [network() for network in networks] == [None, None]
