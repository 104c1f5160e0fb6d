"""Laws that methods obey, bit for bit, on a network with batch norm and real steps."""

import random

import numpy as np
import pytest
import torch
from tests.methods import tiny_runs
from tests.methods.tiny_runs import (
    get_last_row,
    make_context,
    make_unpacked_update,
    make_update,
)
from torch import nn

from pliant.devices import DeviceStatus
from pliant.engine.task_costs import count_sent_bytes, count_step_macs
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
    LocalTraining,
    Sandwich,
    Scaffold,
    ServerAdam,
)
from pliant.methods.base import TaskKey, TaskKeys
from pliant.methods.state import flatten_state
from pliant.nn.elastic import elastic
from pliant.nn.optimisers import Sgd
from pliant.params import digest, get_params, nbytes

LOCAL = LocalTraining(Sgd(lr=0.1, momentum=0.5, weight_decay=1e-3))
SIMPLE = LocalTraining(Sgd(lr=0.1, weight_decay=1e-3))
METHODS = {
    "fedavg": FedAvg(LOCAL),
    "fedadam": FedAvg(LOCAL, server=ServerAdam()),
    "fedprox": FedProx(0.1, LOCAL),
    "fednova": FedNova(LOCAL),
    "scaffold": Scaffold(SIMPLE),
    "feddropout": FedDropout(LOCAL),
    "feddropout-mean": FedDropout(LOCAL, merging="mean", weighting="samples"),
    "heterofl": HeteroFl(LOCAL),
    "heterofl-masked": HeteroFl(LOCAL, masked=True),
    "fjord": Fjord(LOCAL),
    "fjord-distilled": Fjord(LOCAL, distilled=True),
    "fjord-dynamic": Fjord(LOCAL, dynamic=True),
    "sandwich": Sandwich(LOCAL),
    "fedrolex": FedRolex(LOCAL),
    "elfish": Elfish(LOCAL),
    "distreal": Distreal(local=LOCAL),
    "distreal-fixed": Distreal(local=LOCAL, filters="round", adapts=False, merging="counts"),
    "coherent": Coherent(local=LOCAL),
    "coherent-prefix": Coherent(local=LOCAL, filters="prefix"),
}


def make_small_net():
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


NET = make_small_net()


def make_state(method):
    return tiny_runs.make_state(NET, method)


def make_batches(device, steps=3, size=4):
    rng = torch.Generator().manual_seed(device)
    return [
        (
            torch.randn(size, 1, 8, 8, generator=rng),
            torch.randint(0, 3, (size,), generator=rng),
        )
        for _ in range(steps)
    ]


def run_rounds(method, rounds=2, *, rows=None, sizes=(4, 4, 4), steps=3):
    """Run rounds with three devices, which keep their state between rounds."""
    state, device_states = make_state(method), {}
    for round in range(rounds):
        updates = [
            make_update(
                method,
                NET,
                state,
                device,
                make_batches(device + 10 * round, steps, size),
                row=get_last_row(method, NET) if rows is None else rows[device],
                round=round,
                device_state=device_states.get(device),
                num_samples=size * steps,
                classes=(0, 1, 2),
            )
            for device, size in enumerate(sizes)
        ]
        state = method.merge(NET, state, updates)
        device_states = {update.device: update.device_state for update in updates}
    return state.params


def are_equal(left, right):
    return all(torch.equal(left[name], right[name]) for name in left)


UNEQUAL = (7, 3, 5)
MEAN = FedAvg(LOCAL, weighting="equal")


@pytest.mark.parametrize(
    ("method", "plain"),
    [
        (FedProx(0.0, LOCAL), FedAvg(LOCAL)),
        (FedNova(LOCAL), FedAvg(LOCAL)),  # all take three steps
        (Distreal(local=LOCAL), FedAvg(LOCAL)),  # reported MACs are in proportion to samples
        (Distreal(local=LOCAL, filters="round", merging="samples"), FedAvg(LOCAL)),
        (Distreal(local=LOCAL, filters="round", adapts=False), FedAvg(LOCAL)),
        (Distreal(local=LOCAL, merging="counts"), MEAN),
        (HeteroFl(LOCAL), MEAN),
        (HeteroFl(LOCAL, weighting="samples"), FedAvg(LOCAL)),
        (FedRolex(LOCAL, weighting="samples"), FedAvg(LOCAL)),
        (FedDropout(LOCAL, weighting="samples"), FedAvg(LOCAL)),
        (HeteroFl(LOCAL, masked=True), MEAN),  # where every device has every class
        (FedRolex(LOCAL), MEAN),
        (FedDropout(LOCAL), MEAN),
        (FedDropout(LOCAL, merging="mean", weighting="samples"), FedAvg(LOCAL)),
        (Elfish(LOCAL), FedAvg(LOCAL)),
        (Fjord(LOCAL, widths=(1.0,)), FedAvg(LOCAL)),
        (Fjord(LOCAL, dynamic=True), FedAvg(LOCAL)),
        (Sandwich(LOCAL, widths=(1.0,)), FedAvg(LOCAL)),
        (Coherent(local=LOCAL), MEAN),
        (Coherent(local=LOCAL, filters="prefix"), MEAN),
    ],
    ids=lambda value: type(value).__name__,
)
def test_with_all_filters_it_is_fedavg(method, plain):
    assert are_equal(run_rounds(method, sizes=UNEQUAL), run_rounds(plain, sizes=UNEQUAL))


@pytest.mark.parametrize("rounds", [1, 2])
def test_scaffold_without_variates_is_fedavg(rounds):
    scaffold, fedavg = (run_rounds(method(SIMPLE), rounds) for method in (Scaffold, FedAvg))
    assert are_equal(scaffold, fedavg) == (rounds == 1)  # there are variates from round 2 on


def test_the_distinctive_part_of_a_method_changes_its_result():
    plain = run_rounds(FedAvg(LOCAL), sizes=UNEQUAL)
    for method in (FedProx(0.1, LOCAL), MEAN, FedAvg(LOCAL, server=ServerAdam())):
        assert not are_equal(run_rounds(method, sizes=UNEQUAL), plain)
    for name in ("feddropout", "heterofl", "fedrolex", "elfish", "distreal", "coherent"):
        assert not are_equal(run_rounds(METHODS[name], rows=(0, 0, 0)), plain), name


def make_updates(method):
    state = make_state(method)
    return [
        make_update(
            method,
            NET,
            state,
            device,
            make_batches(device, 3, size),
            row=(device * get_last_row(method, NET)) // 2,
            num_samples=3 * size,
        )
        for device, size in enumerate(UNEQUAL)
    ]


@pytest.mark.parametrize("name", METHODS)
def test_merging_does_not_depend_on_the_order_in_which_updates_arrive(name):
    method = METHODS[name]
    updates = make_updates(method)
    expected = method.merge(NET, make_state(method), updates)
    shuffled = updates[:]
    for number in range(4):
        random.Random(number).shuffle(shuffled)
        merged = method.merge(NET, make_state(method), shuffled)
        assert digest(merged.params) == digest(expected.params)
        assert type(merged) is type(expected)
        assert digest(flatten_state(merged)) == digest(flatten_state(expected))


@pytest.mark.parametrize("name", METHODS)
def test_a_method_can_be_encoded_and_decoded(name):
    from pliant.methods import AnyMethod
    from pliant.value import decode, encode

    assert decode(encode(METHODS[name]), AnyMethod) == METHODS[name]


@pytest.mark.parametrize(
    "name", ["feddropout", "heterofl", "fedrolex", "fjord", "sandwich", "distreal-fixed"]
)
def test_a_packed_subnet_trains_exactly_as_in_the_full_network(name):
    method = METHODS[name]
    state = make_state(method)
    row = get_last_row(method, NET) // 2
    packed = make_update(method, NET, state, 1, make_batches(1), row=row)
    assert packed.subnet is not None
    full = make_unpacked_update(method, NET, state, 1, make_batches(1), row=row)
    assert are_equal(packed.delta, NET.take(full.delta, packed.subnet))
    merged = method.merge(NET, state, [packed]).params
    assert not are_equal(merged, state.params)
    assert are_equal(merged, method.merge(NET, state, [full]).params)
    rest = NET.put(full.delta, {n: 0 * t for n, t in packed.delta.items()}, packed.subnet)
    assert all(not tensor.any() for tensor in rest.values()), "nothing else has moved"


def test_disjoint_subnets_are_merged_without_loss():
    method = FedRolex(LOCAL, widths=(0.5, 1.0))
    state = make_state(method)
    updates = [
        make_update(method, NET, state, 0, make_batches(0), row=0),
        make_update(method, NET, state, 1, make_batches(1), row=0, round=3),  # second half of six
    ]
    merged = method.merge(NET, state, updates).params
    first, second = (update.subnet.masks[0] for update in updates)
    assert not (first & second).any()
    assert (first | second).all()
    for update, mask in zip(updates, (first, second), strict=True):
        for name in ("0.weight", "1.running_mean"):
            expected = state.params[name][mask] + update.delta[name]
            assert torch.equal(merged[name][mask], expected), name


def test_statistics_of_absent_channels_are_not_counted():
    method = HeteroFl(LOCAL, s=0.5, levels=2)
    state = make_state(method)
    half = make_update(method, NET, state, 0, make_batches(0), row=0)
    full = make_update(method, NET, state, 1, make_batches(1), row=1)
    merged = method.merge(NET, state, [half, full]).params
    absent = ~half.subnet.masks[0]
    expected = state.params["1.running_var"] + full.delta["1.running_var"]
    assert torch.equal(merged["1.running_var"][absent], expected[absent])
    assert merged["1.num_batches_tracked"].item() == 3


def test_classes_that_a_device_does_not_have_are_left_alone():
    method = HeteroFl(LocalTraining(Sgd(lr=0.1)), masked=True)
    state = make_state(method)
    two_classes = [(x, y % 2) for x, y in make_batches(0)]
    row = get_last_row(method, NET)
    update = make_update(method, NET, state, 0, two_classes, row=row, classes=(0, 1))
    assert not update.delta["8.weight"][2].any()
    assert update.delta["8.weight"][:2].any()
    other = make_update(method, NET, state, 1, make_batches(1), row=row, classes=(0, 1, 2))
    merged = method.merge(NET, state, [update, other]).params
    # only the second device counts for class 2
    assert torch.equal(merged["8.bias"][2], (state.params["8.bias"] + other.delta["8.bias"])[2])
    mean = (update.delta["8.bias"].double() + other.delta["8.bias"].double()) / 2
    expected = (state.params["8.bias"].double() + mean).float()
    assert torch.equal(merged["8.bias"][:2], expected[:2])


def make_status(speeds):
    count = len(speeds)
    full = np.full(count, 10.0)
    return DeviceStatus(
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
    policy = make_context(NET, METHODS[name]).budget_policy
    speeds = np.linspace(5.0, 60.0, 12)
    together = policy.choose(make_status(speeds))
    for index, speed in enumerate(speeds):
        alone = policy.choose(make_status([speed]))
        assert alone.row[0] == together.row[index]
        assert alone.macs[0] == together.macs[index]


@pytest.mark.parametrize("name", METHODS)
def test_a_step_only_uses_filters_that_were_sent(name):
    method = METHODS[name]
    context = make_context(NET, method)
    for row in (0, get_last_row(method, NET)):
        for device in range(3):
            key = TaskKey(0, 2, device)
            sent = context.subnet_to_send(row, key) or NET.full
            for step in range(3):
                used = context.select_subnet(row, key, step)
                assert all((u <= s).all() for u, s in zip(used.masks, sent.masks, strict=True))


@pytest.mark.parametrize("name", METHODS)
def test_training_without_batches_returns_tensors_of_the_same_shapes(name):
    method = METHODS[name]
    empty = make_update(method, NET, make_state(method), 0, [], rows=[0])
    real = make_update(method, NET, make_state(method), 0, make_batches(0), row=0)
    assert {n: t.shape for n, t in empty.extra.items()} == {
        n: t.shape for n, t in real.extra.items()
    }
    assert type(empty.device_state) is type(real.device_state)
    assert flatten_state(empty.device_state).keys() == flatten_state(real.device_state).keys()
    assert all(torch.isfinite(t).all() for t in empty.extra.values())


@pytest.mark.parametrize("name", METHODS)
def test_steps_cost_the_same_one_at_a_time_and_all_at_once(name):
    context = make_context(NET, METHODS[name])
    rows = np.array([0, get_last_row(METHODS[name], NET)] * 4)
    keys = TaskKeys(3, 2, np.arange(8) * 5)
    for step in range(3):
        alone = [
            context.step_macs(row, TaskKey(3, 2, device), step)
            for row, device in zip(rows.tolist(), keys.devices.tolist(), strict=True)
        ]
        assert count_step_macs(context, rows, keys, step).tolist() == alone
    params = get_params(NET.module)
    sent = [
        context.subnet_to_send(row, TaskKey(3, 2, device))
        for row, device in zip(rows.tolist(), keys.devices.tolist(), strict=True)
    ]
    sizes = [nbytes(params if subnet is None else NET.take(params, subnet)) for subnet in sent]
    assert count_sent_bytes(context, params, rows, keys).tolist() == sizes
