"""Laws that methods keep, bit for bit, on a network with batch norm and real steps."""

import random

import numpy as np
import pytest
import torch
from tiny import answer, in_place, last_row
from torch import nn

from pliant.devices import Moment
from pliant.methods import (
    Coherent,
    Distreal,
    Elfish,
    FedAvg,
    FedDropout,
    FedNova,
    FedProx,
    FedRolex,
    Fjord,
    HeteroFl,
    Local,
    Scaffold,
    ServerAdam,
)
from pliant.methods.base import Place, State
from pliant.nn.elastic import elastic
from pliant.nn.optimiser import Sgd
from pliant.params import digest, params_of

LOCAL = Local(Sgd(lr=0.1, momentum=0.5, weight_decay=1e-3))
SIMPLE = Local(Sgd(lr=0.1, weight_decay=1e-3))
METHODS = {
    "fedavg": FedAvg(LOCAL),
    "fedadam": FedAvg(LOCAL, server=ServerAdam()),
    "fedprox": FedProx(0.1, LOCAL),
    "fednova": FedNova(LOCAL),
    "scaffold": Scaffold(SIMPLE),
    "feddropout": FedDropout(LOCAL),
    "feddropout-mean": FedDropout(LOCAL, merging="mean", weigh="samples"),
    "heterofl": HeteroFl(LOCAL),
    "heterofl-masked": HeteroFl(LOCAL, masked=True),
    "fjord": Fjord(LOCAL),
    "fjord-distilled": Fjord(LOCAL, distilled=True),
    "fjord-dynamic": Fjord(LOCAL, dynamic=True),
    "fedrolex": FedRolex(LOCAL),
    "elfish": Elfish(LOCAL),
    "distreal": Distreal(local=LOCAL),
    "distreal-fixed": Distreal(local=LOCAL, filters="round", adapts=False, merging="counts"),
    "coherent": Coherent(local=LOCAL),
    "coherent-prefix": Coherent(local=LOCAL, filters="prefix"),
}


def small_net():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        net = nn.Sequential(
            nn.Conv2d(1, 6, 3),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Conv2d(6, 5, 3, bias=False),
            nn.BatchNorm2d(5),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(20, 3),
        )
    return elastic(net, torch.zeros(2, 1, 8, 8))


NET = small_net()


def begin():
    return State(params_of(NET.net))


def batches(device, steps=3, size=4):
    draws = torch.Generator().manual_seed(device)
    return [
        (
            torch.randn(size, 1, 8, 8, generator=draws),
            torch.randint(0, 3, (size,), generator=draws),
        )
        for _ in range(steps)
    ]


def play(method, rounds=2, *, rows=None, sizes=(4, 4, 4), steps=3):
    """Run rounds of three devices; they remember what the method lets them remember."""
    state, memory = begin(), {}
    for round in range(rounds):
        updates = [
            answer(
                method,
                NET,
                state,
                device,
                batches(device + 10 * round, steps, size),
                row=last_row(method, NET) if rows is None else rows[device],
                round=round,
                memory=memory.get(device, {}),
                owned=size * steps,
                classes=(0, 1, 2),
            )
            for device, size in enumerate(sizes)
        ]
        state = method.merge(NET, state, updates)
        memory = {update.device: update.memory for update in updates}
    return state.params


def same(left, right):
    return all(torch.equal(left[name], right[name]) for name in left)


UNEQUAL = (7, 3, 5)
MEAN = FedAvg(LOCAL, weigh="equal")


@pytest.mark.parametrize(
    ("method", "plain"),
    [
        (FedProx(0.0, LOCAL), FedAvg(LOCAL)),
        (FedNova(LOCAL), FedAvg(LOCAL)),
        (Distreal(local=LOCAL), FedAvg(LOCAL)),  # reported MACs are in proportion to samples
        (Distreal(local=LOCAL, filters="round", merging="samples"), FedAvg(LOCAL)),
        (Distreal(local=LOCAL, filters="round", adapts=False), FedAvg(LOCAL)),
        (Distreal(local=LOCAL, merging="counts"), MEAN),
        (HeteroFl(LOCAL), MEAN),
        (HeteroFl(LOCAL, masked=True), MEAN),  # where every device has every class
        (FedRolex(LOCAL), MEAN),
        (FedDropout(LOCAL), MEAN),
        (FedDropout(LOCAL, merging="mean", weigh="samples"), FedAvg(LOCAL)),
        (Elfish(LOCAL), FedAvg(LOCAL)),
        (Fjord(LOCAL, widths=(1.0,)), FedAvg(LOCAL)),
        (Fjord(LOCAL, dynamic=True), FedAvg(LOCAL)),
        (Coherent(local=LOCAL), MEAN),
        (Coherent(local=LOCAL, filters="prefix"), MEAN),
    ],
    ids=lambda value: type(value).__name__,
)
def test_with_all_filters_it_is_fedavg(method, plain):
    assert same(play(method, sizes=UNEQUAL), play(plain, sizes=UNEQUAL))


def test_scaffold_without_variates_is_fedavg():
    assert same(play(Scaffold(SIMPLE), rounds=1), play(FedAvg(SIMPLE), rounds=1))
    assert not same(play(Scaffold(SIMPLE), rounds=2), play(FedAvg(SIMPLE), rounds=2))


def test_what_sets_a_method_apart_changes_its_result():
    plain = play(FedAvg(LOCAL), sizes=UNEQUAL)
    for method in (FedProx(0.1, LOCAL), MEAN, FedAvg(LOCAL, server=ServerAdam())):
        assert not same(play(method, sizes=UNEQUAL), plain)
    for name in ("feddropout", "heterofl", "fedrolex", "elfish", "distreal", "coherent"):
        assert not same(play(METHODS[name], rows=(0, 0, 0)), plain), name


def updates_of(method, sizes=UNEQUAL, rows=None):
    state = begin()
    found = []
    for device, size in enumerate(sizes):
        row = (device * last_row(method, NET)) // 2 if rows is None else rows[device]
        found.append(
            answer(method, NET, state, device, batches(device, 3, size), row=row, owned=3 * size)
        )
    return found


@pytest.mark.parametrize("name", METHODS)
def test_merging_does_not_depend_on_the_order_in_which_updates_arrive(name):
    method = METHODS[name]
    updates = updates_of(method)
    wanted = method.merge(NET, begin(), updates)
    mixed = updates[:]
    for number in range(4):
        random.Random(number).shuffle(mixed)
        found = method.merge(NET, begin(), mixed)
        assert digest(found.params) == digest(wanted.params)
        assert found.extra.keys() == wanted.extra.keys()
        assert all(same(found.extra[key], wanted.extra[key]) for key in wanted.extra)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_a_value_that_goes_through_plain_data(name):
    from pliant.methods import AnyMethod
    from pliant.value import decode, encode

    assert decode(encode(METHODS[name]), AnyMethod) == METHODS[name]


@pytest.mark.parametrize("name", ["feddropout", "heterofl", "fedrolex", "fjord", "distreal-fixed"])
def test_a_packed_sub_network_trains_as_it_would_in_place(name):
    method, state = METHODS[name], begin()
    row = last_row(method, NET) // 2
    packed = answer(method, NET, state, 1, batches(1), row=row)
    assert packed.subnet is not None
    whole = in_place(method, NET, state, 1, batches(1), row=row)
    assert same(packed.change, NET.take(whole.change, packed.subnet))
    merged = method.merge(NET, state, [packed]).params
    assert not same(merged, state.params)
    assert same(merged, method.merge(NET, state, [whole]).params)
    rest = NET.put(whole.change, {n: 0 * t for n, t in packed.change.items()}, packed.subnet)
    assert all(not tensor.any() for tensor in rest.values()), "nothing else has moved"


def test_disjoint_sub_networks_lose_nothing():
    method, state = FedRolex(LOCAL, widths=(0.5, 1.0)), begin()
    one = answer(method, NET, state, 0, batches(0), row=0)
    other = answer(method, NET, state, 1, batches(1), row=0, round=3)  # the second half of six
    found = method.merge(NET, state, [one, other]).params
    first, second = one.subnet.masks[0], other.subnet.masks[0]
    assert not (first & second).any()
    assert (first | second).all()
    for update, mask in ((one, first), (other, second)):
        for name in ("0.weight", "1.running_mean"):
            wanted = state.params[name][mask] + update.change[name]
            assert torch.equal(found[name][mask], wanted), name


def test_statistics_of_absent_channels_are_not_counted():
    method, state = HeteroFl(LOCAL, s=0.5, levels=2), begin()
    half = answer(method, NET, state, 0, batches(0), row=0)
    whole = answer(method, NET, state, 1, batches(1), row=1)
    found = method.merge(NET, state, [half, whole]).params
    absent = ~half.subnet.masks[0]
    wanted = state.params["1.running_var"] + whole.change["1.running_var"]
    assert torch.equal(found["1.running_var"][absent], wanted[absent])
    assert found["1.num_batches_tracked"].item() == 3


def test_classes_that_a_device_does_not_have_are_left_alone():
    method, state = HeteroFl(Local(Sgd(lr=0.1)), masked=True), begin()
    two = [(x, y % 2) for x, y in batches(0)]
    row = last_row(method, NET)
    update = answer(method, NET, state, 0, two, row=row, classes=(0, 1))
    assert not update.change["8.weight"][2].any()
    assert update.change["8.weight"][:2].any()
    other = answer(method, NET, state, 1, batches(1), row=row, classes=(0, 1, 2))
    found = method.merge(NET, state, [update, other]).params
    # of class 2 only the second device counts
    assert torch.equal(found["8.bias"][2], (state.params["8.bias"] + other.change["8.bias"])[2])
    mean = (update.change["8.bias"].double() + other.change["8.bias"].double()) / 2
    wanted = (state.params["8.bias"].double() + mean).float()
    assert torch.equal(found["8.bias"][:2], wanted[:2])


def moment(speeds):
    count = len(speeds)
    full = np.full(count, 10.0)
    return Moment(
        np.arange(count),
        0,
        np.zeros(count),
        np.asarray(speeds),
        np.full(count, 1.0),
        1.0,
        full,
        4 * full,
        4 * full,
    )


@pytest.mark.parametrize("name", METHODS)
def test_no_method_reads_another_devices_trace(name):
    plan = METHODS[name].plan(NET)
    speeds = np.linspace(5.0, 60.0, 12)
    together = plan.choose(moment(speeds))
    for place, speed in enumerate(speeds):
        alone = plan.choose(moment([speed]))
        assert alone.row[0] == together.row[place]
        assert alone.macs[0] == together.macs[place]


@pytest.mark.parametrize("name", METHODS)
def test_a_step_has_the_filters_of_what_was_sent(name):
    method = METHODS[name]
    for row in (0, last_row(method, NET)):
        for device in range(3):
            place = Place(0, 2, device)
            sent = method.sends(NET, row, place) or NET.full
            for step in range(3):
                used = method.subnet(NET, row, place, step)
                assert all((u <= s).all() for u, s in zip(used.masks, sent.masks, strict=True))


@pytest.mark.parametrize("name", METHODS)
def test_training_on_nothing_shows_what_comes_back(name):
    method = METHODS[name]
    nothing = answer(method, NET, begin(), 0, [], rows=[0])
    real = answer(method, NET, begin(), 0, batches(0), row=0)
    assert {n: t.shape for n, t in nothing.extra.items()} == {
        n: t.shape for n, t in real.extra.items()
    }
    assert nothing.memory.keys() == real.memory.keys()
    assert all(torch.isfinite(t).all() for t in nothing.extra.values())
