import msgspec
import pytest
import torch
from little import ADASPLIT, LOCAL, data, network, run

from pliant.devices import Constant, Fleet, Steps
from pliant.nn.optimiser import Adam
from pliant.split import AdaSplit, Local, Split, SplitFed
from pliant.split.session import Session


def changed(**fields):
    return msgspec.structs.replace(ADASPLIT, **fields)


def test_the_local_phase_sends_nothing_and_the_global_one_k_messages_an_iteration():
    records = run()
    iterations = 3  # of the client with most data: 24 images in batches of 8
    assert [record.exchange.uplinks for record in records] == [0, 0, 2 * iterations, 2 * iterations]
    assert [record.up > 0 for record in records] == [False, False, True, True]
    assert [record.down for record in records] == [0, 0, 0, 0]
    assert [record.samples for record in records] == [24 + (8 + 8 + 1) + 3 * 8] * 4


class Watched:
    """A floor that lets everything through."""

    def __init__(self, session):
        self.session = session

    def present(self):
        return list(range(len(self.session.data)))

    def compute(self, client, work):
        return True

    def send(self, client, message, shape, payload):
        return payload.decode(message.body, shape), torch.zeros(shape[0], dtype=torch.int64)

    def serve(self, client, work): ...
    def give_back(self, client, size, *, dense, nonzero): ...
    def note(self, client, loss): ...
    def gather(self): ...


def clients_after(method, *, scale):
    session = Session(network(), data(), LOCAL, "stage1", seed=0, has_head=method.has_head)
    method.begin(session)
    session.served.part.params["stage5.weight"].mul_(scale)  # another server loss
    method.train(session, Watched(session), 0, 1)
    return {client: part.params for client, part in session.clients.items()}


def same(left, right):
    return all(torch.equal(left[c][n], t) for c in right for n, t in right[c].items())


def test_no_client_feels_the_server_unless_its_gradient_is_asked_for():
    alone = changed(kappa=0.0)
    assert same(clients_after(alone, scale=1.0), clients_after(alone, scale=-3.0))
    felt = changed(kappa=0.0, gradient=True)
    assert not same(clients_after(felt, scale=1.0), clients_after(felt, scale=-3.0))


def test_masks_only_leaves_clients_as_they_were_drawn():
    method = changed(objective="none", kappa=0.0, eta=1.0)
    found = clients_after(method, scale=1.0)
    session = Session(network(), data(), LOCAL, "stage1", seed=0)
    method.begin(session)
    assert same(found, {client: part.params for client, part in session.clients.items()})


def test_the_hybrid_under_constant_full_resources_is_adasplit_bit_for_bit():
    assert run(changed(elastic=True))[-1].digest == run()[-1].digest
    assert run(changed(elastic=True, thrift=3.0))[-1].digest == run()[-1].digest


def test_the_hybrid_spends_less_where_there_is_less_and_keeps_pace():
    slow = Fleet(size=3, speed=Constant(0.5))
    plain, hybrid = run(fleet=slow), run(changed(elastic=True), fleet=slow)
    assert hybrid[-1].seconds < 0.8 * plain[-1].seconds
    assert hybrid[0].macs < 0.7 * plain[0].macs
    assert hybrid[-1].digest != plain[-1].digest


@pytest.mark.parametrize(
    "method",
    [
        changed(head=False),
        changed(select="random"),
        changed(beta=1e-4),
        changed(relay=True),
        changed(gradient=True),
        changed(penalised="all", threshold=0.3),
        changed(cut="stage3"),
        Split(local=LOCAL, turn="pass"),
        SplitFed(local=LOCAL, version=1),
        SplitFed(local=LOCAL, version=2),
    ],
)
def test_every_switch_runs_and_gives_a_result_of_its_own(method):
    records = run(method, rounds=2, given=data((16, 9, 8)))
    assert records[-1].digest != run(rounds=2, given=data((16, 9, 8)))[-1].digest
    assert len(records[-1].personal.each) == 3
    assert bool(records[-1].personal.shut) == bool(method.threshold)


def test_beta_makes_activations_sparse_and_messages_short():
    quick = Local(Adam(lr=0.03), batch=8)
    plain, sparse = (run(changed(kappa=0.0, local=quick, beta=beta)) for beta in (0.0, 0.1))
    assert sparse[-1].exchange.dense == plain[-1].exchange.dense
    assert sparse[-1].exchange.nonzero < 0.7 * plain[-1].exchange.nonzero
    assert sparse[-1].up < plain[-1].up


def test_relay_gives_all_clients_one_part_and_is_charged():
    records = run(changed(relay=True), rounds=1)
    part = 4 * (4 * 25 + 4 + 4 * 128 + 128 + 128 * 64 + 64)
    assert records[0].exchange.relayed == 3 * 3 * part  # iterations × clients × bytes


def test_a_learned_network_is_better_than_chance():
    quick = AdaSplit(local=Local(Adam(lr=0.01), batch=8), kappa=0.3)
    records = run(quick, rounds=8, given=data((48, 48, 48)))
    assert records[-1].accuracy > 0.6


def test_a_client_with_one_class_and_one_with_one_image_take_part():
    given = data((16, 8, 1), only={1: 2})
    records = run(given=given)
    assert records[-1].merged == 3
    assert records[-1].ends == {"finished": 3}


def test_when_nobody_is_there_time_passes_until_somebody_comes():
    late = Fleet(size=3, speed=Steps(times=(0.0, 3.0), speeds=(0.0, 1.0)))
    records = run(fleet=late, rounds=1)
    assert 4.0 <= records[0].seconds < 4.5  # three seconds of nobody, one of work, some waiting


def test_an_elastic_client_needs_a_head():
    with pytest.raises(ValueError, match="head and an objective of its own"):
        AdaSplit(elastic=True, head=False)
