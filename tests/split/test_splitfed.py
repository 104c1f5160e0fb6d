import pytest
import torch
from tests.split.small_split import (
    ADASPLIT,
    LOCAL,
    FreeEnvironment,
    make_data,
    make_faulty,
    make_network,
    run,
)

from pliant.devices import Fleet
from pliant.split import SplitFed, VanillaSplit
from pliant.split.exchange import SplitRound
from pliant.split.session import Session


def train(method, *, sizes=(24, 17, 8), rounds=1, available=None, make_client=None):
    """Train and return the full networks of the clients and the costs of the last round."""
    data, fleet = make_data(sizes), Fleet(size=len(sizes))
    session = Session(method, make_network(), data, fleet, seed=0, make_client=make_client)
    for number in range(rounds):
        environment = FreeEnvironment(len(sizes), available)
        method.train(SplitRound(session, environment, number, rounds, max_abs=1e6))
    return [session.assemble_params(client, 0.0) for client in session.clients], environment.costs


def assert_equal(networks, others):
    for network, other in zip(networks, others, strict=True):
        assert all(torch.equal(tensor, other[name]) for name, tensor in network.items())


@pytest.mark.parametrize("version", [1, 2])
def test_a_client_whose_messages_are_all_refused_is_not_averaged(version):
    method = SplitFed(local=LOCAL, version=version)
    refused = make_faulty(lambda client, message: {} if client == 1 else message)
    networks, costs = train(method, make_client=refused)
    assert_equal(networks, train(method, available=[0, 2])[0])
    assert costs[1].relayed == 0
    assert costs[1].down == 4 * (4 * 25 + 4)  # the mean, which it needs in the next round


@pytest.mark.parametrize("version", [1, 2])
def test_splitfed_with_one_client_is_split_learning(version):
    """Over several rounds, so that optimisers must keep their states."""
    splitfed = train(SplitFed(local=LOCAL, version=version), sizes=(17,), rounds=3)[0]
    assert_equal(splitfed, train(VanillaSplit(local=LOCAL), sizes=(17,), rounds=3)[0])


@pytest.mark.parametrize(
    "method",
    [
        ADASPLIT,
        VanillaSplit(local=LOCAL),
        VanillaSplit(local=LOCAL, turn="pass"),
        SplitFed(local=LOCAL),
        SplitFed(local=LOCAL, version=2),
    ],
)
def test_all_methods_visit_as_many_images(method):
    """Three mini-batches of each client: 24, 8 + 8 + 1 and three times 8 images."""
    assert [record.samples for record in run(method, rounds=2)] == [65, 65]
