"""CoCoFL: exact costs of frozen layers, and what a device trains."""

import pytest
import torch
from tests.methods.test_personal import LOCAL, make_data
from tests.methods.tiny_runs import make_state, make_update
from torch import nn

from pliant.devices import ConstantTrace, Fleet
from pliant.engine.round_loop import RunSettings
from pliant.engine.round_rules import RoundRules
from pliant.engine.simulate import simulate
from pliant.methods import CoCoFl, FedAvg
from pliant.methods.base import TaskKey
from pliant.nn.elastic import elastic
from pliant.nn.optimisers import Adam
from pliant.nn.trainer import SubnetTrainer
from pliant.params import get_params


def make_net():
    """Three layers of 4·4·9 · 4 = 576, 4·4 · 4·8 = 512 and 128 · 4 = 512 MACs."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 8, 1)]
    return nn.Sequential(*layers, nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4))


def make_elastic():
    return elastic(make_net(), torch.rand(1, 1, 6, 6))


FORWARD = 576 + 512 + 512
BATCH = (torch.rand(4, 1, 6, 6, generator=torch.Generator().manual_seed(0)), torch.arange(4))


# Blocks of layers, by what a step costs beyond the forward pass; the images need no gradient.
BACKWARD = {
    (2, 3): 512,  # the last layer: its weights only
    (1, 2): 512 + 512,  # and what leads there through the last
    (1, 3): 512 + 2 * 512,
    (0, 1): 512 + 512 + 576,
    (0, 2): 512 + 2 * 512 + 576,
    (0, 3): 2 * 512 + 2 * 512 + 576,
}
# The blocks that fit at each row and are not part of another, in the order of their layers.
LARGEST = [[(2, 3)], [(1, 2), (2, 3)], [(1, 3)], [(0, 1), (1, 3)], [(0, 2), (1, 3)], [(0, 3)]]
CHOICES = [(row, block) for row, blocks in enumerate(LARGEST) for block in blocks]


def find_device(row, block):
    """Return a device that draws this block."""
    number, count = LARGEST[row].index(block), len(LARGEST[row])
    return next(
        device
        for device in range(100)
        if TaskKey(0, 0, device).rng_stream("block").integers(count) == number
    )


@pytest.mark.parametrize(("row", "block"), CHOICES)
def test_frozen_layers_cost_the_forward_pass_and_the_way_to_the_block(row, block):
    key = TaskKey(0, 0, find_device(row, block))
    assert CoCoFl(LOCAL).macs(make_elastic(), row, key, 0) == FORWARD + BACKWARD[block]


def test_there_is_a_row_for_the_cost_of_every_block():
    net = make_elastic()
    shares = CoCoFl(LOCAL).make_budget_policy(net).rows.shares
    full = net.macs(net.full, training=True)
    assert [round(share * full) for share in shares] == [FORWARD + b for b in BACKWARD.values()]


@pytest.mark.parametrize(("row", "block"), CHOICES)
def test_only_the_block_is_trained(row, block):
    net, method = make_elastic(), CoCoFl(LOCAL)
    layers = [("0.", "1."), ("3.", "4."), ("7.",)][slice(*block)]
    prefixes = tuple(prefix for names in layers for prefix in names)
    state, device = make_state(net, method), find_device(row, block)
    frozen = make_update(method, net, state, device, [BATCH, BATCH], row=row)
    for name in net.trainable_names:
        assert bool(frozen.delta[name].any()) == name.startswith(prefixes), name


def test_the_gradients_of_the_block_are_those_of_the_full_network():
    net = make_elastic()
    params = get_params(net.module)

    def compute_loss(output):
        return nn.functional.cross_entropy(output, BATCH[1])

    trainers = [SubnetTrainer(net, params, Adam(weight_decay=0.1)) for _ in range(2)]
    trainers[0].freeze(frozenset({"0.weight", "0.bias", "7.weight", "7.bias"}))
    for trainer in trainers:
        trainer.step(BATCH[0], compute_loss)
    partial, full = (trainer.params() for trainer in trainers)
    for name in net.trainable_names:
        is_frozen = name.startswith(("0.", "7."))
        assert torch.equal(partial[name], params[name] if is_frozen else full[name]), name


def test_with_nothing_frozen_it_is_fedavg():
    settings = RunSettings(rounds=3, per_round=3, rules=RoundRules(late="wait"))
    fast = Fleet(size=4, speed=ConstantTrace(1.0))
    digests, macs = zip(
        *(
            (records[-1].digest, records[-1].macs)
            for records in (
                list(simulate(method, make_net(), make_data(), fast, settings=settings))
                for method in (CoCoFl(LOCAL), FedAvg(LOCAL))
            )
        ),
        strict=True,
    )
    assert digests[0] == digests[1]
    assert macs[0] == macs[1]


def test_slow_devices_freeze_layers_and_arrive_in_time():
    settings = RunSettings(rounds=3, per_round=4, rules=RoundRules(late="discard"))
    slow = Fleet(size=4, speed=ConstantTrace(0.8))
    records = list(simulate(CoCoFl(LOCAL), make_net(), make_data(), slow, settings=settings))
    assert [record.merged for record in records] == [4, 4, 4]
    plain = list(simulate(FedAvg(LOCAL), make_net(), make_data(), slow, settings=settings))
    assert [record.merged for record in plain] == [0, 0, 0]
