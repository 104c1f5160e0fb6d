"""The laws of the methods with auxiliary losses, and CSE-FSL against a loop in plain torch."""

import copy

import pytest
import torch
import torch.nn.functional as F
from tests.split.small_split import LOCAL, FreeEnvironment, make_data, make_network, run

from pliant.devices import Fleet
from pliant.nn.optimisers import Sgd
from pliant.params import clone, get_params
from pliant.split import AdaSplit, AuxSplit, SplitTraining, VanillaSplit
from pliant.split.aux_split import compute_activation_gradient
from pliant.split.client_module import compute_auxiliary_loss, make_classifier
from pliant.split.exchange import SplitRound
from pliant.split.session import Session

SGD = SplitTraining(Sgd(lr=0.1, momentum=0.0), batch=8, period=0)
X = torch.zeros(1, 1, 16, 16)


def make_session(method, sizes=(24, 17, 8)):
    return Session(method, make_network(), make_data(sizes), Fleet(size=len(sizes)), seed=0)


def train(method, session, number=0):
    environment = FreeEnvironment(len(session.data))
    method.train(SplitRound(session, environment, number, 4, max_abs=1e6))
    return environment.costs


class ServerAsHead(AuxSplit, frozen=True, tag="server_as_head"):
    """Auxiliary-loss split learning whose auxiliary is a copy of the server's part."""

    def make_head(self, shape, classes):
        net = make_network()
        return torch.nn.Sequential(net.stage2, net.stage3, net.stage4, net.stage5)


def copy_server_to_heads(session):
    server = list(session.server.effective_params(0).values())
    for client in session.clients.values():
        heads = [name for name in client.params if name.startswith("head.")]
        client.load_params(client.params | dict(zip(heads, server, strict=True)))


def test_an_auxiliary_equal_to_the_server_gives_the_gradient_of_split_learning():
    method, vanilla = ServerAsHead(local=SGD, every=1), VanillaSplit(local=SGD)
    auxiliary, split = make_session(method, (8,)), make_session(vanilla, (8,))
    copy_server_to_heads(auxiliary)
    train(method, auxiliary)
    train(vanilla, split)
    before = get_params(split.template)
    for name, tensor in split.clients[0].params.items():  # equal but for rounding
        update = tensor - before[name]
        error = auxiliary.clients[0].params[name] - tensor
        assert error.abs().max() < 1e-5 * update.abs().max()


def train_cse_fsl(session, every, steps):
    """Train one round of CSE-FSL with torch.optim and autograd alone."""
    clients = [copy.deepcopy(session.template) for _ in session.data.shares]
    server = copy.deepcopy(session.split_network.server)
    server_optimiser = torch.optim.SGD(server.parameters(), lr=0.1)
    for step in range(steps):
        for number, client in enumerate(clients):
            x, y = session.load_batch(number, 0, step)
            activation = client.device(x)
            if step % every == 0:
                server_optimiser.zero_grad()
                F.cross_entropy(server(activation.detach()), y).backward()
                server_optimiser.step()
            client.zero_grad()
            F.cross_entropy(client.head(activation), y).backward()
            with torch.no_grad():
                for param in client.parameters():
                    param -= 0.1 * param.grad
    sizes = [len(share) for share in session.data.shares]
    states = [client.state_dict() for client in clients]
    mean = {
        name: sum(size * state[name] for size, state in zip(sizes, states, strict=True))
        / sum(sizes)
        for name in states[0]
    }
    return mean, server.state_dict()


def test_without_alignment_and_with_averaging_it_is_cse_fsl():
    method = AuxSplit(local=SGD, every=2)
    session = make_session(method)
    part, server = train_cse_fsl(session, every=2, steps=3)
    costs = train(method, session)
    assert [cost.uplinks for cost in costs] == [2, 2, 2]  # mini-batches 0 and 2
    assert all(cost.down == session.device_bytes for cost in costs)  # no gradients
    for name, tensor in part.items():
        assert torch.allclose(session.clients[1].params[name], tensor, atol=1e-6), name
    for name, tensor in server.items():
        assert torch.allclose(session.server.effective_params(0)[name], tensor, atol=1e-6), name


class AdaSplitByClasses(AdaSplit, frozen=True, tag="adasplit_by_classes"):
    """AdaSplit with the auxiliary loss instead of the contrastive one."""

    def make_head(self, shape, classes):
        return make_classifier(shape, classes)

    def _compute_local_loss(self, output, labels):
        return compute_auxiliary_loss(output, labels)


def test_with_masks_and_without_averaging_it_is_adasplit_with_another_local_loss():
    method = AuxSplit(local=LOCAL, every=1, federate=False, server="masks")
    adasplit = AdaSplitByClasses(local=LOCAL, kappa=0.0, eta=1.0)
    assert run(method)[-1].digest == run(adasplit)[-1].digest


def test_copies_of_the_server_for_one_client_are_the_shared_server():
    data = make_data((17,))
    shared, copies = (
        run(AuxSplit(local=LOCAL, every=1, server=server), data=data)
        for server in ("shared", "copies")
    )
    assert [record.loss for record in copies] == [record.loss for record in shared]
    assert copies[-1].personal == shared[-1].personal


def test_a_classifier_equal_to_the_server_is_already_aligned():
    method = ServerAsHead(local=SGD, align=1)
    session = make_session(method)
    train(method, session)  # fills the buffer; the classifier is aligned, not trained
    copy_server_to_heads(session)
    part = session.clients[0].params
    aligned = method._align(session, part, [0, 1, 2])
    assert all(torch.equal(tensor, part[name]) for name, tensor in aligned.items())


def test_each_sample_has_the_gradient_of_its_own_loss():
    linear = torch.nn.Linear(1, 2, bias=False)
    params = {"weight": torch.tensor([[1.0], [-1.0]])}
    batch = torch.zeros(2, 1), torch.tensor([0, 1])
    # both classes have probability 1/2, so W.T (p - y) is -1/2 - 1/2 and 1/2 + 1/2
    assert compute_activation_gradient(linear, params, batch).tolist() == [[-1.0], [1.0]]


def test_every_sample_weighs_the_same_in_the_alignment_whoever_sent_it():
    method = AuxSplit(local=SGD, align=1, align_lr=1e-2, align_steps=5)
    session = make_session(method)
    batches = [session.load_batch(client, 0, 0) for client in (0, 1)]
    with torch.no_grad():
        sent = [(session.split_network.device(x), y) for x, y in batches]
    sent[1] = sent[1][0][:2], sent[1][1][:2]
    part = session.clients[0].params
    aligned = []
    for buffers in ([sent[0], sent[1]], [tuple(map(torch.cat, zip(*sent, strict=True)))]):
        session.server.batches = dict(enumerate(buffers))
        aligned.append(method._align(session, part, [0, 1]))
    for name, tensor in aligned[0].items():
        assert torch.allclose(tensor, aligned[1][name], atol=1e-5), name
        assert torch.equal(tensor, part[name]) == (not name.startswith("head.")), name


@pytest.mark.parametrize("federate", [True, False])
def test_only_the_alignment_changes_classifiers_and_it_brings_gradients_nearer(federate):
    method = AuxSplit(local=SGD, align=2, align_lr=1e-2, federate=federate)
    session = make_session(method)
    start = {client: clone(part.params) for client, part in session.clients.items()}

    def measure_error(params):
        head = {n.removeprefix("head."): t for n, t in params.items() if n.startswith("head.")}
        batch, server = session.server.batches[0], session.split_network.server
        target = compute_activation_gradient(server, session.server.effective_params(0), batch)
        wrong = compute_activation_gradient(session.template.head, head, batch) - target
        return float(wrong.square().sum())

    costs = train(method, session)
    aligned = {client: clone(part.params) for client, part in session.clients.items()}
    assert measure_error(aligned[0]) < 0.9 * measure_error(start[0])
    assert costs[0].down == costs[0].relayed == session.device_bytes
    train(method, session, number=1)
    for client, part in session.clients.items():
        for name, tensor in part.params.items():
            assert torch.equal(tensor, aligned[client][name]) == name.startswith("head."), name


def test_the_server_keeps_the_newest_activations():
    method = AuxSplit(local=SGD, align=1, buffer=10, every=1)
    session = make_session(method, (24,))
    train(method, session)
    labels = torch.cat([session.load_batch(0, 0, step)[1] for step in range(3)])
    assert session.server.batches[0][1].tolist() == labels[-10:].tolist()


def test_copies_need_averaging_and_are_not_aligned():
    for fields in ({"federate": False}, {"align": 1}):
        with pytest.raises(ValueError, match="Expected `federate` and neither"):
            AuxSplit(server="copies", **fields)


def test_a_run_can_be_interrupted_between_two_alignments(tmp_path):
    method = AuxSplit(local=LOCAL, align=3, every=2, federate=False, server="masks")
    whole = run(method)
    assert len(run(method, folder=tmp_path, stop=2)) == 2
    resumed = run(method, folder=tmp_path)
    assert [record.up for record in resumed] == [record.up for record in whole[2:]]
    assert resumed[-1].digest == whole[-1].digest
