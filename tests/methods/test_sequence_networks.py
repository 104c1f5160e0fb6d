"""Methods that train subnets, on small transformers and on a network of signals."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from tests.methods.tiny_runs import get_last_row, make_state, make_update

import pliant as pl
from pliant.data import TrainTestData
from pliant.params import get_params
from pliant.table_search import UniformRates

TEXT = partial(pl.models.text_transformer, 3, vocabulary=11, length=6, depth=1)
VISION = partial(pl.models.vit_small, 3, depth=1, channels=1, side=8)
SIGNAL = partial(pl.models.signal_cnn, 3, channels=2)
# the network, one of half the width, and the shape of a sample
NETWORKS = {
    "text_transformer": (
        partial(TEXT, width=8, heads=2), partial(TEXT, width=4, heads=1), (6,)
    ),
    "vit_small": (
        partial(VISION, width=8, heads=2), partial(VISION, width=4, heads=1), (1, 8, 8)
    ),
    "signal_cnn": (partial(SIGNAL, filters=(6, 4)), partial(SIGNAL, filters=(3, 2)), (2, 16)),
}  # fmt: skip
LOCAL = pl.LocalTraining(pl.Sgd(lr=0.1), batch=4)
METHODS = {
    "distreal": pl.Distreal(local=LOCAL),
    "heterofl": pl.HeteroFl(LOCAL),
    "fjord": pl.Fjord(LOCAL),
    "coherent": pl.Coherent(local=LOCAL),
    "progressive": pl.Progressive(local=LOCAL),
}


def make_samples(shape, count, seed=0):
    rng = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (count,), generator=rng)
    if len(shape) == 1:
        return torch.randint(0, 11, (count, *shape), generator=rng), labels
    return torch.randn(count, *shape, generator=rng), labels


def make_net(name):
    make, _, shape = NETWORKS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return pl.elastic(make(), make_samples(shape, 2)[0])


def make_batches(name, device):
    shape = NETWORKS[name][2]
    return [make_samples(shape, 6, 10 * device + step) for step in range(2)]


def cut(tensor, like):
    """Return the first entries, as a class token is sent whole."""
    return tensor[tuple(map(slice, like.shape))]


@pytest.mark.parametrize("name", NETWORKS)
def test_half_of_a_network_trains_like_a_network_of_half_the_width(name):
    method = pl.HeteroFl(pl.LocalTraining(pl.Sgd(lr=0.1)), s=0.5, levels=2, scaled=False)
    net, batches = make_net(name), make_batches(name, 0)
    state = make_state(net, method)
    update = make_update(method, net, state, 0, batches, row=0)
    small = NETWORKS[name][1]()
    sent = net.take(state.params, update.subnet)
    before = {tensor: cut(sent[tensor], value) for tensor, value in get_params(small).items()}
    small.load_state_dict(before)
    optimiser = torch.optim.SGD(small.parameters(), lr=0.1)
    for x, y in batches:
        optimiser.zero_grad()
        F.cross_entropy(small(x), y).backward()
        optimiser.step()
    for tensor, value in get_params(small).items():
        delta, expected = cut(update.delta[tensor], value), value - before[tensor]
        torch.testing.assert_close(delta, expected, rtol=1e-4, atol=1e-6)
    # a round of one level changes nothing else
    merged = method.merge(net, state, [update]).params
    rest = net.put(merged, sent, update.subnet)
    assert all(torch.equal(rest[tensor], state.params[tensor]) for tensor in rest)


@pytest.mark.parametrize("method", ["distreal", "heterofl", "fjord", "coherent"])
@pytest.mark.parametrize("name", NETWORKS)
def test_with_all_filters_a_round_is_that_of_fedavg(name, method):
    net, merged = make_net(name), []
    full = {"fjord": pl.Fjord(LOCAL, widths=(1.0,))}.get(method, METHODS[method])
    for kind in (full, pl.FedAvg(LOCAL)):
        state, row = make_state(net, kind), get_last_row(kind, net)
        updates = [
            make_update(kind, net, state, device, make_batches(name, device), row=row)
            for device in range(2)
        ]
        merged.append(kind.merge(net, state, updates).params)
    assert all(torch.equal(merged[0][tensor], merged[1][tensor]) for tensor in merged[1])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", NETWORKS)
def test_slow_devices_train_narrow_subnets_and_change_the_network(name, method):
    make, _, shape = NETWORKS[name]
    train, test = (
        pl.ImageDataset.from_tensors(*make_samples(shape, count), classes=3) for count in (48, 12)
    )
    data = TrainTestData(train=train, test=test).share(pl.Iid(), devices=3, proxy=8)
    fleet = pl.Fleet(size=3, speed=pl.ConstantTrace(low=0.3, high=0.9))
    settings = pl.RunSettings(per_round=3, rules=pl.RoundRules(late="partial"))
    net = make()
    rounds = [*pl.simulate(METHODS[method], net, data, fleet, rounds=2, settings=settings)]
    assert all(record.macs > 0 and record.accuracy is not None for record in rounds)
    assert all(record.merged == 3 for record in rounds)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_table_is_searched(name):
    make, _, shape = NETWORKS[name]
    proxy = pl.ImageDataset.from_tensors(*make_samples(shape, 32), classes=3)
    short = pl.ShortTrainingSettings(batches=1, batch=8, seeds=1, snapshot_batches=1)
    settings = pl.SearchSettings(
        UniformRates(3), objective=short, corner_seeds=1, fresh_seeds=1, rows=2
    )
    table = pl.search(make(), proxy, settings)
    net = pl.elastic(make(), make_samples(shape, 2)[0])
    assert [len(rates) for rates in table.rates] == [len(net.sites)] * len(table.rates)
    assert set(table.rates[-1]) == {0.0}
