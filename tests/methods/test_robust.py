from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pliant.data import Iid, load_dataset
from pliant.engine.evaluation import Evaluation, evaluate
from pliant.engine.local_work import Job, run_job
from pliant.engine.worker_context import WorkerContext
from pliant.methods import FedAvg, FedProx, LocalTraining
from pliant.methods.aggregation import apply_delta, average_deltas, weight_by
from pliant.methods.base import ServerState, TaskKey, Update
from pliant.methods.robust import AnyMerge, Krum, Mean, Median, TrimmedMean, merge_by_rule
from pliant.nn.elastic import elastic
from pliant.nn.models import digits_cnn
from pliant.nn.optimisers import Sgd
from pliant.params import clone, get_params
from pliant.value import decode, encode

ROBUST = [Median(), TrimmedMean(share=0.2), Krum(share=0.2), Krum(share=0.2, keep=None)]


def make_update(device, *values):
    delta = {"weight": torch.tensor(values)}
    return Update(device, delta, samples=1, steps=1, macs=1.0, loss=0.0)


def make_updates(*values):
    return [make_update(device, float(value)) for device, value in enumerate(values)]


@cache
def make_one_weight():
    """Make an arbitrary network, which these merges do not use."""
    return elastic(nn.Linear(1, 1, bias=False), torch.zeros(1, 1))


def merge_params(rule, params, updates, net=None, weights=None):
    """Return the parameters after a merge, with one weight per device."""
    net = net or make_one_weight()
    weigh = (lambda update: 1) if weights is None else (lambda update: weights[update.device])
    return apply_delta(params, merge_by_rule(rule, net, params, updates, weigh))


def merge(rule, updates, start=(0.0,), weights=None):
    params = {"weight": torch.tensor(start)}
    return merge_params(rule, params, updates, weights=weights)["weight"].tolist()


def get_devices(updates):
    return [update.device for update in updates]


def test_the_mean_is_weighted_and_ruined_by_one_malicious_device():
    assert merge(Mean(), make_updates(1, 3), weights=[3, 1]) == [1.5]
    assert merge(Mean(), make_updates(1, 1, 1, 997)) == [250.0]


def test_the_median_is_the_middle_value_or_the_mean_of_the_middle_two():
    assert merge(Median(), make_updates(1, 2, 900)) == [2.0]
    assert merge(Median(), make_updates(-900, 4, 1, 2)) == [1.5]
    assert merge(Median(), make_updates(7), start=(10.0,)) == [17.0]
    updates = [make_update(0, 1.0, 9.0), make_update(1, 2.0, 8.0), make_update(2, 3.0, 1.0)]
    assert merge(Median(), updates, start=(0.0, 0.0)) == [2.0, 8.0]


def test_the_trimmed_mean_trims_its_share_at_both_ends():
    assert merge(TrimmedMean(share=0.2), make_updates(-900, 1, 2, 6, 900)) == [3.0]
    assert merge(TrimmedMean(share=0.0), make_updates(1, 2, 6)) == [3.0]
    assert merge(TrimmedMean(share=0.2), make_updates(1, 2, 6)) == [3.0]  # a fifth of three is none
    ten = make_updates(*range(8), 900, 901)
    assert merge(TrimmedMean(share=0.3), ten) == [4.5]  # 3, 4, 5 and 6 are left


def test_krum_takes_the_delta_nearest_to_its_neighbours():
    # five devices, one malicious: the two nearest neighbours count; the scores are
    # 0: 1 + 9, 1: 1 + 4, 3: 4 + 4, 5: 4 + 16, 100: 9025 + 9409
    five = make_updates(0, 1, 3, 5, 100)
    assert get_devices(Krum(share=0.2).select_updates(five)) == [1]
    assert merge(Krum(share=0.2), five, start=(10.0,)) == [11.0]
    assert get_devices(Krum(share=0.2, keep=2).select_updates(five)) == [1, 2]
    assert get_devices(Krum(share=0.2, keep=2).select_updates(five[::-1])) == [1, 2]
    assert merge(Krum(share=0.2, keep=2), five) == [2.0]
    assert get_devices(Krum(share=0.2, keep=None).select_updates(five)) == [0, 1, 2, 3]


def test_krum_assumes_no_more_malicious_devices_than_it_tolerates():
    # two malicious devices would need seven in all: with five, one is assumed
    def select(*values, keep=None):
        return get_devices(Krum(share=0.4, keep=keep).select_updates(make_updates(*values)))

    assert select(0, 0, 0, 0, 0, 9, 9) == [0, 1, 2, 3, 4]
    assert select(0, 0, 0, 9, 9) == [0, 1, 2, 3]
    assert select(4, 9, keep=1) == [0]
    assert select(4, keep=1) == [0]


def test_krum_ignores_counters():
    params = {"weight": torch.zeros(1), "seen": torch.tensor(5)}
    updates = [
        Update(d, {"weight": torch.tensor([w]), "seen": torch.tensor(s)}, 1, 1, 1.0, 0.0)
        for d, (w, s) in enumerate([(1.0, 1000), (1.1, 1), (1.2, 3), (9.0, 2), (1.15, 500)])
    ]
    merged = merge_params(Krum(share=0.2), params, updates)
    assert torch.equal(merged["weight"], torch.tensor([1.15]))
    assert merged["seen"].item() == 505
    assert merge_params(Median(), params, updates)["seen"].item() == 8


@pytest.mark.parametrize("rule", [Mean(), *ROBUST])
def test_without_updates_the_network_stays_as_it_is(rule):
    params = {"weight": torch.tensor([1.0])}
    assert torch.equal(merge_params(rule, params, [])["weight"], params["weight"])


@pytest.mark.parametrize("rule", [Mean(), *ROBUST])
def test_equal_deltas_are_merged_unchanged(rule):
    assert merge(rule, make_updates(*[0.5] * 7), start=(1.0,)) == [1.5]
    assert merge(rule, make_updates(0.5), start=(1.0,)) == [1.5]


@given(
    honest=st.lists(st.floats(-1, 1, width=32), min_size=8, max_size=8),
    malicious=st.lists(st.floats(-1e6, 1e6, width=32), min_size=2, max_size=2),
)
@pytest.mark.parametrize("rule", ROBUST[:3])
def test_with_two_malicious_devices_of_ten_the_merge_stays_within_the_honest_range(
    rule, honest, malicious
):
    [weight] = merge(rule, make_updates(*malicious, *honest))
    assert min(honest) - 1e-6 <= weight <= max(honest) + 1e-6


@given(st.lists(st.floats(-9, 9, width=32), min_size=1, max_size=9), st.randoms())
@pytest.mark.parametrize("rule", ROBUST[:2])
def test_the_order_of_devices_does_not_matter(rule, values, random):
    shuffled = list(values)
    random.shuffle(shuffled)
    assert merge(rule, make_updates(*values)) == merge(rule, make_updates(*shuffled))


def test_the_mean_is_the_average_of_all_methods():
    updates, net = make_updates(0.1, 0.7, 0.3), make_one_weight()
    params, weight = {"weight": torch.tensor([1.0])}, weight_by("samples")
    delta = merge_by_rule(Mean(), net, params, updates, weight)["weight"]
    assert torch.equal(delta, average_deltas(net, params, updates, weight)["weight"])


def test_rules_are_decoded_and_checked():
    for rule in (Mean(), *ROBUST):
        assert decode(encode(rule), AnyMerge) == rule
    method = decode({"type": "fedavg", "merging": {"type": "krum", "keep": 3}}, FedAvg)
    assert method.merging == Krum(keep=3)
    assert FedProx(merging=Median()).merging == Median()
    with pytest.raises(ValueError, match=r"Expected `float` < 0.5 - at `\$.share` of TrimmedMean"):
        TrimmedMean(share=0.5)


@pytest.fixture(scope="module")
def two_filters():
    """A network of two filters with one weight each, and their sum."""
    net = nn.Sequential(nn.Conv2d(1, 2, 1, bias=False), nn.Flatten(), nn.Linear(2, 1, bias=False))
    return elastic(net, torch.zeros(1, 1, 1, 1)), get_params(net)


def make_packed_update(net, params, device, filters, value):
    order = (torch.tensor(filters + [f for f in range(2) if f not in filters]).numpy(),)
    subnet = net.select_prefix(1 - len(filters) / 2, order)
    delta = {name: torch.full_like(t, value) for name, t in net.take(params, subnet).items()}
    return Update(device, delta, 1, 1, 1.0, 0.0, subnet=subnet)


def test_packed_deltas_are_merged_among_the_devices_that_hold_a_coordinate(two_filters):
    net, params = two_filters
    updates = [
        make_packed_update(net, params, 0, [0], 1.0),
        make_packed_update(net, params, 1, [0, 1], 4.0),
        make_packed_update(net, params, 2, [0], -900.0),
    ]
    for rule in (Median(), TrimmedMean(share=0.4)):
        merged = merge_params(rule, params, updates, net)
        delta = (merged["0.weight"] - params["0.weight"]).reshape(-1)
        assert torch.allclose(delta, torch.tensor([1.0, 4.0]), atol=1e-6)
    merged = merge_params(Median(), params, updates[::2], net)
    assert torch.equal(merged["0.weight"][1], params["0.weight"][1])  # which no device holds


def test_krum_rejects_packed_updates(two_filters):
    net, params = two_filters
    updates = [make_packed_update(net, params, device, [device], 1.0) for device in (0, 1)]
    with pytest.raises(ValueError, match="Krum: expected updates of the full network"):
        merge_params(Krum(), params, updates, net)


DEVICES, MALICIOUS, ROUNDS = 5, (3,), 3


@pytest.fixture(scope="module")
def context():
    torch.manual_seed(1)
    data = load_dataset("digits").share(Iid(), 14, seed=1)
    net = digits_cnn(filters=(4, 8), hidden=32)
    local = LocalTraining(Sgd(lr=0.1, momentum=0.5), batch=20)
    return WorkerContext(elastic(net, data.make_example()), data, FedAvg(local))


def measure_accuracy(context, rule, malicious):
    """Train for a few rounds in which malicious devices flip and enlarge their deltas."""
    local = context.method.local
    method = FedAvg(local, merging=rule)
    state = ServerState(get_params(context.net.module))
    for number in range(ROUNDS):
        updates = []
        for device in range(DEVICES):
            steps = len(context.data.shares[device]) // local.batch
            key, lr = TaskKey(1, number, device), local.optimiser.lr
            job = Job(key, (0,) * steps, (1.0,) * steps, lr, None)
            update = run_job(context, state.params, job)
            if device in malicious:
                flipped = {name: -10 * tensor for name, tensor in clone(update.delta).items()}
                update = replace(update, delta=flipped)
            updates.append(update)
        state = method.merge(context.net, state, updates)
    return evaluate(context.net.module, state.params, context.data, Evaluation()).accuracy


def test_a_fifth_of_sign_flipping_devices_ruins_the_mean(context):
    assert measure_accuracy(context, Mean(), ()) > 0.8
    assert measure_accuracy(context, Mean(), MALICIOUS) < 0.3


@pytest.mark.parametrize("rule", ROBUST)
def test_a_fifth_of_sign_flipping_devices_does_not_ruin_a_robust_merge(context, rule):
    assert measure_accuracy(context, rule, MALICIOUS) > 0.75
