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
from pliant.engine.run_store import load_run_state
from pliant.engine.split_loop import SplitState
from pliant.params import select_subtree
from pliant.split import AuxSplit, Payload, SplitFed, VanillaSplit
from pliant.split.exchange import SplitRound
from pliant.split.payload import decode_labels
from pliant.split.session import Session


def train(method, *, sizes=(24, 17, 8), rounds=1, available=None, make_client=None):
    """Train and return the full networks of the clients and the costs of the last round."""
    data, fleet = make_data(sizes), Fleet(size=len(sizes))
    session = Session(method, make_network(), data, fleet, seed=0, make_client=make_client)
    for number in range(rounds):
        environment = FreeEnvironment(len(sizes), available)
        method.train(SplitRound(session, environment, number, rounds, max_abs=1e6))
    networks = [
        session.assemble_params(client, session.server.effective_params(client))
        for client in session.clients
    ]
    return networks, environment.costs


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


class WithholdingClient:
    """A client that trains with the server, and then sends no part that could be averaged."""

    def __init__(self, client):
        self._client = client

    def __getattr__(self, name):
        return getattr(self._client, name)

    @property
    def params(self):
        return {name: tensor * torch.nan for name, tensor in self._client.params.items()}


@pytest.mark.parametrize("method", [SplitFed(local=LOCAL, version=2), AuxSplit(local=LOCAL)])
def test_the_shared_part_of_the_server_is_trained_by_accepted_clients_only(method, tmp_path):
    messages = []

    def make_client(client):
        honest_forward = client.forward

        def forward():
            messages.append((client.number, honest_forward()))
            return messages[-1][1]

        client.forward = forward
        return WithholdingClient(client) if client.number == 1 else client

    records = run(method, rounds=1, make_client=make_client, folder=tmp_path)
    assert records[0].outcomes == {"finished": 2, "rejected": 1}
    session = Session(method, make_network(), make_data(), Fleet(size=3), seed=0)
    server, lr = session.make_server(), method.local.lr_at(0)
    assert {client for client, _ in messages} == {0, 1, 2}
    for client, message in messages:
        if client != 1:
            activations = session.payload.decode(message.body, message.shape)
            labels = decode_labels(message.labels, 3)
            server.step(client, activations, labels, lr, needs_gradient=False)
    trained = load_run_state(tmp_path, SplitState).server_state.params
    assert_equal([server.params], [select_subtree(trained, "params")])


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


def test_gradients_come_back_for_the_features_that_were_sent_only():
    payload, messages = Payload(columns=0.25), []

    def record_messages(client):
        honest_forward, honest_backward = client.forward, client.backward

        def forward():
            messages.append([honest_forward()])
            return messages[-1][0]

        def backward(gradient):
            messages[-1].append(gradient)
            honest_backward(gradient)

        client.forward, client.backward = forward, backward
        return client

    method = SplitFed(local=LOCAL, payload=payload)
    _, costs = train(method, make_client=record_messages)
    for message, gradient in messages:
        sent = payload.read_columns(message.body, message.shape)
        assert int(sent.sum()) == 4 * 8 * 8 // 4
        assert torch.equal(payload.read_columns(gradient, message.shape), sent)
    part = 4 * (4 * 25 + 4)  # up and down
    assert sum(cost.up for cost in costs) == 3 * part + sum(m.size for m, _ in messages)
    assert sum(cost.down for cost in costs) == 3 * part + sum(len(g) for _, g in messages)
