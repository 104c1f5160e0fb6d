from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pliant.data import Iid, load
from pliant.engine.evaluate import Evaluation, evaluate
from pliant.engine.job import Job, World, example_of, perform
from pliant.methods import FedAvg, FedProx, Local
from pliant.methods.average import move
from pliant.methods.base import Place, State, Update
from pliant.methods.merge import mean_change, weight_by
from pliant.methods.robust import AnyMerge, Krum, Mean, Median, TrimmedMean, merged_change
from pliant.nn.elastic import elastic
from pliant.nn.models import digits_cnn
from pliant.nn.optimiser import Sgd
from pliant.params import clone, params_of
from pliant.value import decode, encode

ROBUST = [Median(), TrimmedMean(share=0.2), Krum(share=0.2), Krum(share=0.2, keep=None)]


def update(device, *values, **more):
    change = {"weight": torch.tensor(values)}
    return Update(device, change, samples=1, steps=1, macs=1.0, loss=0.0, **more)


def scalars(*values):
    return [update(device, float(value)) for device, value in enumerate(values)]


@cache
def sum_of(size):
    """A network that does not matter: one weight for each number."""
    return elastic(nn.Linear(size, 1, bias=False), torch.zeros(1, size))


def merged(how, params, updates, net=None, weights=None):
    """Return the network after a merge; a device counts as its place in the weights says."""
    net = net or sum_of(1)
    by_place = (lambda update: 1) if weights is None else (lambda u: weights[u.device])
    return move(params, merged_change(how, net, params, updates, by_place))


def weight(how, updates, start=(0.0,), weights=None):
    return merged(how, {"weight": torch.tensor(start)}, updates, weights=weights)["weight"].tolist()


def devices(updates):
    return [update.device for update in updates]


def test_the_mean_goes_by_weights_and_one_liar_ruins_it():
    assert weight(Mean(), scalars(1, 3), weights=[3, 1]) == [1.5]
    assert weight(Mean(), scalars(1, 1, 1, 997)) == [250.0]


def test_the_median_takes_the_one_or_two_in_the_middle():
    assert weight(Median(), scalars(1, 2, 900)) == [2.0]
    assert weight(Median(), scalars(-900, 4, 1, 2)) == [1.5]
    assert weight(Median(), scalars(7), start=(10.0,)) == [17.0]
    two = [update(0, 1.0, 9.0), update(1, 2.0, 8.0), update(2, 3.0, 1.0)]
    assert weight(Median(), two, start=(0.0, 0.0)) == [2.0, 8.0]


def test_the_trimmed_mean_cuts_its_share_at_both_ends():
    assert weight(TrimmedMean(share=0.2), scalars(-900, 1, 2, 6, 900)) == [3.0]
    assert weight(TrimmedMean(share=0.0), scalars(1, 2, 6)) == [3.0]
    assert weight(TrimmedMean(share=0.2), scalars(1, 2, 6)) == [3.0]  # a fifth of three is none
    ten = scalars(*range(8), 900, 901)
    assert weight(TrimmedMean(share=0.3), ten) == [4.5]  # 3, 4, 5 and 6 are left


def test_krum_takes_the_change_that_lies_nearest_to_its_neighbours():
    # five devices, one liar: the two nearest neighbours count; the scores are
    # 0: 1 + 9, 1: 1 + 4, 3: 4 + 4, 5: 4 + 16, 100: 9025 + 9409
    five = scalars(0, 1, 3, 5, 100)
    assert devices(Krum(share=0.2).chosen(five)) == [1]
    assert weight(Krum(share=0.2), five, start=(10.0,)) == [11.0]
    assert devices(Krum(share=0.2, keep=2).chosen(five)) == [1, 2]
    assert devices(Krum(share=0.2, keep=2).chosen(five[::-1])) == [1, 2]
    assert weight(Krum(share=0.2, keep=2), five) == [2.0]
    assert devices(Krum(share=0.2, keep=None).chosen(five)) == [0, 1, 2, 3]


def test_krum_assumes_no_more_liars_than_so_few_devices_stand():
    # two liars in five would need seven devices: one is assumed
    def kept(*values, keep=None):
        return devices(Krum(share=0.4, keep=keep).chosen(scalars(*values)))

    assert kept(0, 0, 0, 0, 0, 9, 9) == [0, 1, 2, 3, 4]
    assert kept(0, 0, 0, 9, 9) == [0, 1, 2, 3]
    assert kept(4, 9, keep=1) == [0]
    assert kept(4, keep=1) == [0]


def test_krum_does_not_look_at_counters():
    params = {"weight": torch.zeros(1), "seen": torch.tensor(5)}
    updates = [
        Update(d, {"weight": torch.tensor([w]), "seen": torch.tensor(s)}, 1, 1, 1.0, 0.0)
        for d, (w, s) in enumerate([(1.0, 1000), (1.1, 1), (1.2, 3), (9.0, 2), (1.15, 500)])
    ]
    found = merged(Krum(share=0.2), params, updates)
    assert torch.equal(found["weight"], torch.tensor([1.15]))
    assert found["seen"].item() == 505
    assert merged(Median(), params, updates)["seen"].item() == 8


@pytest.mark.parametrize("how", [Mean(), *ROBUST])
def test_nothing_is_merged_into_nothing_new(how):
    params = {"weight": torch.tensor([1.0])}
    assert torch.equal(merged(how, params, [])["weight"], params["weight"])


@pytest.mark.parametrize("how", [Mean(), *ROBUST])
def test_equal_changes_are_merged_as_they_are(how):
    assert weight(how, scalars(*[0.5] * 7), start=(1.0,)) == [1.5]
    assert weight(how, scalars(0.5), start=(1.0,)) == [1.5]


@given(
    honest=st.lists(st.floats(-1, 1, width=32), min_size=8, max_size=8),
    lies=st.lists(st.floats(-1e6, 1e6, width=32), min_size=2, max_size=2),
)
@pytest.mark.parametrize("how", ROBUST[:3])
def test_two_liars_among_ten_never_leave_the_range_of_the_honest(how, honest, lies):
    [found] = weight(how, scalars(*lies, *honest))
    assert min(honest) - 1e-6 <= found <= max(honest) + 1e-6


@given(st.lists(st.floats(-9, 9, width=32), min_size=1, max_size=9), st.randoms())
@pytest.mark.parametrize("how", ROBUST[:2])
def test_the_order_of_devices_does_not_matter(how, values, random):
    shuffled = list(values)
    random.shuffle(shuffled)
    assert weight(how, scalars(*values)) == weight(how, scalars(*shuffled))


def test_the_mean_is_the_one_of_all_methods():
    updates = scalars(0.1, 0.7, 0.3)
    params, by = {"weight": torch.tensor([1.0])}, weight_by("samples")
    found = merged_change(Mean(), sum_of(1), params, updates, by)["weight"]
    assert torch.equal(found, mean_change(sum_of(1), params, updates, by)["weight"])


def test_choices_are_read_from_plain_data():
    for how in (Mean(), *ROBUST):
        assert decode(encode(how), AnyMerge) == how
    method = decode({"type": "fedavg", "merging": {"type": "krum", "keep": 3}}, FedAvg)
    assert method.merging == Krum(keep=3)
    assert FedProx(merging=Median()).merging == Median()
    with pytest.raises(ValueError, match=r"Expected `float` < 0.5 - at `\$.share` of TrimmedMean"):
        TrimmedMean(share=0.5)


@pytest.fixture(scope="module")
def pair():
    """Two filters of one weight each, and a sum of them."""
    net = nn.Sequential(nn.Conv2d(1, 2, 1, bias=False), nn.Flatten(), nn.Linear(2, 1, bias=False))
    return elastic(net, torch.zeros(1, 1, 1, 1)), params_of(net)


def packed(net, params, device, filters, value):
    order = (torch.tensor(filters + [f for f in range(2) if f not in filters]).numpy(),)
    subnet = net.first(1 - len(filters) / 2, order)
    change = {name: torch.full_like(t, value) for name, t in net.take(params, subnet).items()}
    return Update(device, change, 1, 1, 1.0, 0.0, subnet=subnet)


def test_packed_changes_are_merged_among_the_devices_that_hold_a_coordinate(pair):
    net, params = pair
    updates = [
        packed(net, params, 0, [0], 1.0),
        packed(net, params, 1, [0, 1], 4.0),
        packed(net, params, 2, [0], -900.0),
    ]
    for how, first, second in [(Median(), 1.0, 4.0), (TrimmedMean(share=0.4), 1.0, 4.0)]:
        found = merged(how, params, updates, net)
        change = (found["0.weight"] - params["0.weight"]).reshape(-1)
        assert torch.allclose(change, torch.tensor([first, second]), atol=1e-6)
    alone = merged(Median(), params, updates[::2], net)
    assert torch.equal(alone["0.weight"][1], params["0.weight"][1])  # which nobody holds


def test_krum_refuses_packed_updates(pair):
    net, params = pair
    updates = [packed(net, params, device, [device], 1.0) for device in (0, 1)]
    with pytest.raises(ValueError, match="Krum: expected updates of the whole network"):
        merged(Krum(), params, updates, net)


DEVICES, LIARS, ROUNDS = 5, (3,), 3


@pytest.fixture(scope="module")
def world():
    torch.manual_seed(1)
    data = load("digits").share(Iid(), 14, seed=1)
    net = digits_cnn(filters=(4, 8), hidden=32)
    local = Local(Sgd(lr=0.1, momentum=0.5), batch=20)
    return World(elastic(net, example_of(data)), data, FedAvg(local))


def accuracy(world, how, liars):
    """Train for a few rounds in which liars turn their change round and enlarge it."""
    method = FedAvg(world.method.local, merging=how)
    state = State(params_of(world.net.net))
    for number in range(ROUNDS):
        updates = []
        for device in range(DEVICES):
            steps = len(world.data.devices[device]) // world.method.local.batch
            lr = world.method.local.optimiser.lr
            job = Job(Place(1, number, device), (0,) * steps, (1.0,) * steps, lr, {})
            found = perform(world, state.params, job)
            if device in liars:
                turned = {name: -10 * tensor for name, tensor in clone(found.change).items()}
                found = replace(found, change=turned)
            updates.append(found)
        state = method.merge(world.net, state, updates)
    return evaluate(world.net.net, state.params, world.data, Evaluation()).accuracy


def test_a_fifth_of_sign_flipping_devices_ruins_the_mean(world):
    assert accuracy(world, Mean(), ()) > 0.8
    assert accuracy(world, Mean(), LIARS) < 0.3


@pytest.mark.parametrize("how", ROBUST)
def test_a_fifth_of_sign_flipping_devices_does_not_ruin_a_robust_merge(world, how):
    assert accuracy(world, how, LIARS) > 0.75
