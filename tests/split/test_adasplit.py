import msgspec
import pytest
import torch
from tests.split.small_split import (
    ADASPLIT,
    LOCAL,
    FreeEnvironment,
    make_data,
    make_network,
    make_settings,
    run,
)

from pliant.devices import ConstantTrace, Fleet, SteppedTrace
from pliant.engine.evaluation import Evaluation
from pliant.nn.optimisers import Adam
from pliant.split import AdaSplit, SplitFed, SplitTraining, VanillaSplit
from pliant.split.exchange import SplitRound
from pliant.split.session import Session


def make_adasplit(**fields):
    return msgspec.structs.replace(ADASPLIT, **fields)


def test_the_local_phase_sends_nothing_and_the_global_one_k_messages_per_iteration():
    records = run()
    iterations = 3  # of the client with most data: 24 images in batches of 8
    assert [record.exchange.uplinks for record in records] == [0, 0, 2 * iterations, 2 * iterations]
    assert [record.up > 0 for record in records] == [False, False, True, True]
    assert [record.down for record in records] == [0, 0, 0, 0]
    assert [record.samples for record in records] == [24 + (8 + 8 + 1) + 3 * 8] * 4


def make_session(method):
    return Session(method, make_network(), make_data(), Fleet(size=3), seed=0)


def train_clients(method, *, scale):
    """Train one round and return the clients' parameters; `scale` changes the server's loss."""
    session = make_session(method)
    session.server.part.params["stage5.weight"].mul_(scale)
    method.train(SplitRound(session, FreeEnvironment(3), 0, 1, max_abs=1e6))
    return {client: part.params for client, part in session.clients.items()}


def are_equal(left, right):
    return all(torch.equal(left[c][n], t) for c in right for n, t in right[c].items())


def test_clients_depend_on_the_server_only_if_it_sends_gradients():
    local = make_adasplit(kappa=0.0)
    assert are_equal(train_clients(local, scale=1.0), train_clients(local, scale=-3.0))
    served = make_adasplit(kappa=0.0, gradient=True)
    assert not are_equal(train_clients(served, scale=1.0), train_clients(served, scale=-3.0))


def test_without_an_objective_clients_are_not_trained():
    method = make_adasplit(objective="none", kappa=0.0, eta=1.0)
    params = train_clients(method, scale=1.0)
    session = make_session(method)
    assert are_equal(params, {client: part.params for client, part in session.clients.items()})


def test_the_hybrid_under_constant_full_resources_is_adasplit_bit_for_bit():
    assert run(make_adasplit(elastic=True))[-1].digest == run()[-1].digest
    assert run(make_adasplit(elastic=True, cost_exponent=3.0))[-1].digest == run()[-1].digest


def test_the_hybrid_spends_less_and_is_faster_on_slow_devices():
    slow = Fleet(size=3, speed=ConstantTrace(0.5))
    plain, hybrid = run(fleet=slow), run(make_adasplit(elastic=True), fleet=slow)
    assert hybrid[-1].seconds < 0.8 * plain[-1].seconds
    assert hybrid[0].macs < 0.7 * plain[0].macs
    assert hybrid[-1].digest != plain[-1].digest


@pytest.mark.parametrize(
    "method",
    [
        make_adasplit(head=False),
        make_adasplit(select="random"),
        make_adasplit(beta=1e-4),
        make_adasplit(relay=True),
        make_adasplit(gradient=True),
        make_adasplit(penalised="all", threshold=0.3),
        make_adasplit(cut="stage3"),
        VanillaSplit(local=LOCAL, turn="pass"),
        SplitFed(local=LOCAL, version=1),
        SplitFed(local=LOCAL, version=2),
    ],
)
def test_every_option_runs_and_changes_the_result(method):
    records = run(method, rounds=2, data=make_data((16, 9, 8)))
    assert records[-1].digest != run(rounds=2, data=make_data((16, 9, 8)))[-1].digest
    assert len(records[-1].personal.per_device) == 3
    assert bool(records[-1].personal.thresholded) == bool(method.threshold)


def test_beta_makes_activations_sparse_and_messages_short():
    local = SplitTraining(Adam(lr=0.03), batch=8)
    plain, sparse = (run(make_adasplit(kappa=0.0, local=local, beta=beta)) for beta in (0.0, 0.1))
    assert sparse[-1].exchange.dense == plain[-1].exchange.dense
    assert sparse[-1].exchange.nonzero < 0.7 * plain[-1].exchange.nonzero
    assert sparse[-1].up < plain[-1].up


def test_a_penalty_on_all_masks_does_not_depend_on_how_often_clients_are_evaluated():
    method = make_adasplit(penalised="all", kappa=0.0, eta=0.4)
    often = msgspec.structs.replace(make_settings(), evaluation=Evaluation(every=1))
    data = make_data((8, 8, 8))  # one of three clients is selected in the first round
    assert run(method, settings=often, data=data)[-1].digest == run(method, data=data)[-1].digest


def test_the_learning_rate_decays_over_all_rounds_or_over_those_with_an_exchange():
    training = SplitTraining(Adam(lr=2.0), period=4)
    assert [training.lr_at(round, 2) for round in (0, 2, 4)] == pytest.approx([2.0, 1.0, 0.0])
    constant_at_first = msgspec.structs.replace(training, decay="exchanges")
    rates = [constant_at_first.lr_at(round, 2) for round in (0, 2, 4)]
    assert rates == pytest.approx([2.0, 2.0, 1.0])


def test_relayed_parts_are_charged():
    records = run(make_adasplit(relay=True), rounds=1)
    part = 4 * (4 * 25 + 4 + 4 * 128 + 128 + 128 * 64 + 64)
    assert records[0].exchange.relayed == 3 * 3 * part  # iterations × clients × bytes


def test_a_trained_network_is_better_than_chance():
    method = AdaSplit(local=SplitTraining(Adam(lr=0.01), batch=8), kappa=0.3)
    records = run(method, rounds=8, data=make_data((48, 48, 48)))
    assert records[-1].accuracy > 0.6


def test_clients_with_one_class_or_one_image_take_part():
    records = run(data=make_data((16, 8, 1), only={1: 2}))
    assert records[-1].merged == 3
    assert records[-1].outcomes == {"finished": 3}


def test_without_available_clients_time_passes_until_one_comes():
    late = Fleet(size=3, speed=SteppedTrace(times=(0.0, 3.0), speeds=(0.0, 1.0)))
    records = run(fleet=late, rounds=1)
    assert 4.0 <= records[0].seconds < 4.5  # three idle seconds, one of work, some waiting


def test_an_elastic_client_needs_a_head():
    with pytest.raises(ValueError, match="Expected `head` and an objective"):
        AdaSplit(elastic=True, head=False)
