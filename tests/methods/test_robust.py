import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pliant.data import Iid, load
from pliant.engine.evaluate import Evaluation, evaluate
from pliant.engine.job import Job, World, example_of, perform
from pliant.methods import FedAvg, Local
from pliant.methods.base import Place, State, Update, add_mean
from pliant.methods.robust import AnyMerge, Krum, Mean, Median, TrimmedMean, merged
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


def weight(how, updates, start=(0.0,), weights=None):
    params = {"weight": torch.tensor(start)}
    return merged(how, params, updates, weights or [1.0] * len(updates))["weight"].tolist()


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
    assert Krum(share=0.2).chosen(five) == [1]
    assert weight(Krum(share=0.2), five, start=(10.0,)) == [11.0]
    assert Krum(share=0.2, keep=2).chosen(five) == [1, 2]
    assert weight(Krum(share=0.2, keep=2), five) == [2.0]
    assert Krum(share=0.2, keep=None).chosen(five) == [0, 1, 2, 3]


def test_krum_assumes_no_more_liars_than_so_few_devices_stand():
    # a share of .4 of seven would be 2 liars, which seven stand; of five they would be 2: too many
    assert Krum(share=0.4, keep=None).chosen(scalars(0, 0, 0, 0, 0, 9, 9)) == [0, 1, 2, 3, 4]
    assert Krum(share=0.4, keep=None).chosen(scalars(0, 0, 0, 9, 9)) == [0, 1, 2, 3]
    assert Krum(share=0.4).chosen(scalars(4, 9)) == [0]
    assert Krum(share=0.4).chosen(scalars(4)) == [0]


def test_krum_does_not_look_at_counters():
    params = {"weight": torch.zeros(1), "seen": torch.tensor(5)}
    updates = [
        Update(d, {"weight": torch.tensor([w]), "seen": torch.tensor(s)}, 1, 1, 1.0, 0.0)
        for d, (w, s) in enumerate([(1.0, 1000), (1.1, 1), (1.2, 3), (9.0, 2), (1.15, 500)])
    ]
    found = merged(Krum(share=0.2), params, updates, [1.0] * 5)
    assert torch.equal(found["weight"], torch.tensor([1.1]))
    assert found["seen"].item() == 6
    assert merged(Median(), params, updates, [1.0] * 5)["seen"].item() == 8


@pytest.mark.parametrize("how", [Mean(), *ROBUST])
def test_nothing_is_merged_into_nothing_new(how):
    params = {"weight": torch.tensor([1.0])}
    assert merged(how, params, [], []) is params


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


def test_the_mean_is_the_methods_own():
    updates = scalars(0.1, 0.7, 0.3)
    params = {"weight": torch.tensor([1.0])}
    found = merged(Mean(), params, updates, [3, 4, 9])["weight"]
    assert torch.equal(found, add_mean(params, updates, [3, 4, 9])["weight"])


def test_choices_are_read_from_plain_data():
    for how in (Mean(), *ROBUST):
        assert decode(encode(how), AnyMerge) == how
    method = decode({"type": "fedavg", "merging": {"type": "krum", "keep": 3}}, FedAvg)
    assert method.merging == Krum(keep=3)
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
        found = merged(how, params, updates, [1.0] * 3, net=net)
        change = (found["0.weight"] - params["0.weight"]).reshape(-1)
        assert torch.allclose(change, torch.tensor([first, second]), atol=1e-6)
    alone = merged(Median(), params, updates[::2], [1.0] * 2, net=net)
    assert torch.equal(alone["0.weight"][1], params["0.weight"][1])  # which nobody holds


def test_a_rule_that_needs_whole_updates_refuses_packed_ones(pair):
    net, params = pair
    updates = [packed(net, params, device, [device], 1.0) for device in (0, 1)]
    with pytest.raises(ValueError, match="Krum: expected updates of the whole network"):
        merged(Krum(), params, updates, [1.0] * 2, net=net)
    with pytest.raises(ValueError, match="Expected updates of the whole network"):
        merged(Mean(), params, updates, [1.0] * 2, net=net)
    with pytest.raises(ValueError, match="Expected the network with packed updates"):
        merged(Median(), params, updates, [1.0] * 2)


DEVICES, LIARS, ROUNDS = 10, (3, 7), 6


@pytest.fixture(scope="module")
def world():
    torch.manual_seed(1)
    data = load("digits").share(Iid(), 50, seed=1)
    net = digits_cnn(filters=(4, 8), hidden=32)
    local = Local(Sgd(lr=0.1, momentum=0.9), batch=16)
    return World(elastic(net, example_of(data)), data, FedAvg(local))


def accuracy(world, how, liars):
    """Train for a few rounds in which liars turn their change round and enlarge it."""
    method = FedAvg(world.method.local, how)
    state = State(params_of(world.net.net))
    for number in range(ROUNDS):
        updates = []
        for device in range(DEVICES):
            steps = len(world.data.devices[device]) // world.method.local.batch
            job = Job(Place(1, number, device), (0,) * steps, (1.0,) * steps, 0.1, {})
            found = perform(world, state.params, job)
            if device in liars:
                turned = {name: -10 * tensor for name, tensor in clone(found.change).items()}
                found = Update(device, turned, found.samples, found.steps, found.macs, found.loss)
            updates.append(found)
        state = method.merge(world.net, state, updates)
    return evaluate(world.net.net, state.params, world.data, Evaluation()).accuracy


def test_a_fifth_of_sign_flipping_devices_ruins_the_mean(world):
    assert accuracy(world, Mean(), ()) > 0.8
    assert accuracy(world, Mean(), LIARS) < 0.3


@pytest.mark.parametrize("how", ROBUST)
def test_a_fifth_of_sign_flipping_devices_does_not_ruin_a_robust_merge(world, how):
    assert accuracy(world, how, LIARS) > 0.7
