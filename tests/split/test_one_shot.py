"""One-shot split learning: its phases against AuxSplit and against loops in plain torch."""

import copy
import math
from dataclasses import replace

import msgspec
import pytest
import torch
import torch.nn.functional as F
from tests.split.small_split import (
    LOCAL,
    SIZES,
    FreeEnvironment,
    make_data,
    make_faulty,
    make_network,
    make_settings,
    run,
)

from pliant.data import CropFlip
from pliant.devices import Fleet
from pliant.nn.optimisers import Sgd
from pliant.rng import rng_stream
from pliant.split import AuxSplit, OneShotSplit, Payload, SplitTraining
from pliant.split.exchange import SplitRound
from pliant.split.session import Session

SGD = SplitTraining(Sgd(lr=0.1, momentum=0.0), batch=8, period=0)
EXACT = Payload(dtype="float32")
ONE_SHOT = OneShotSplit(local=LOCAL, local_share=0.25, personal_share=0.25, passes=2)
UPLINKS = 3 + 3 + 1  # mini-batches of 8 images in one pass over SIZES


def make_session(method):
    return Session(method, make_network(), make_data(), Fleet(size=3), seed=0)


def train(method, session, number, rounds, available=None):
    environment = FreeEnvironment(len(session.data), available)
    method.train(SplitRound(session, environment, number, rounds, max_abs=1e6))
    return environment.costs


@pytest.mark.parametrize("federate", [True, False])
def test_clients_learn_as_in_auxsplit_and_change_no_more_after_the_transfer(federate):
    method = OneShotSplit(local=LOCAL, local_share=0.5, personal_share=0.0, federate=federate)
    auxiliary = AuxSplit(local=LOCAL, federate=federate)
    sessions = make_session(method), make_session(auxiliary)
    for number in range(3):
        train(method, sessions[0], number, rounds=4)
    for number in range(2):
        train(auxiliary, sessions[1], number, rounds=4)
    for client, part in sessions[1].clients.items():
        for name, tensor in part.params.items():
            assert torch.equal(sessions[0].clients[client].params[name], tensor), name


def make_activations(session):
    """Return the activations and labels of all training images, client after client."""
    indices = torch.cat([torch.from_numpy(share) for share in session.data.shares])
    images = session.data.train
    x = images.normalise(images.pixels[indices], indices)
    return session.split_network.device(x).detach(), images.labels[indices]


def take_steps(server, activations, labels, *address):
    """Train the server's part with plain SGD on mini-batches of 8."""
    order = torch.from_numpy(rng_stream(0, "pool", *address).permutation(len(labels)))
    for rows in torch.split(order, 8):
        server.zero_grad()
        F.cross_entropy(server(activations[rows]), labels[rows]).backward()
        with torch.no_grad():
            for param in server.parameters():
                param -= 0.1 * param.grad


def test_the_server_trains_on_all_activations_and_then_on_those_of_each_client():
    phases = {"local_share": 0.0, "personal_share": 0.5, "passes": 2}
    method = OneShotSplit(local=SGD, payload=EXACT, **phases)
    session = make_session(method)
    activations, labels = make_activations(session)
    for number in range(2):
        train(method, session, number, rounds=2)
    pooled = copy.deepcopy(session.split_network.server)
    for number_of_pass in range(2):
        take_steps(pooled, activations, labels, 0, number_of_pass)
    parts = zip(torch.split(activations, SIZES), torch.split(labels, SIZES), strict=True)
    for client, own in enumerate(parts):
        personal = copy.deepcopy(pooled)
        for number_of_pass in range(2):
            take_steps(personal, *own, 1, number_of_pass, client)
        for name, tensor in personal.state_dict().items():
            result = session.server.effective_params(client)[name]
            assert torch.allclose(result, tensor, atol=1e-5), name
    for name, tensor in pooled.state_dict().items():
        assert torch.allclose(session.server.common.params[name], tensor, atol=1e-5), name


def test_each_image_is_sent_once_and_the_ledger_has_its_encoded_bytes(tmp_path):
    sizes = []

    def measure(client, message):
        sizes.append(message.size)
        return message

    records = run(ONE_SHOT, make_client=make_faulty(measure))
    session = make_session(ONE_SHOT)
    assert [record.exchange.uplinks for record in records] == [0, UPLINKS, 0, 0]
    assert [record.up for record in records] == [3 * session.device_bytes, sum(sizes), 0, 0]
    assert [record.down for record in records] == [3 * session.device_bytes, 0, 0, 0]
    forward = sum(SIZES) * session.device_macs
    assert [record.macs for record in records[1:]] == [forward, 0, 0]  # of clients
    served = ONE_SHOT.passes * sum(SIZES) * session.server_macs
    assert [record.exchange.server for record in records] == [0, served, served, served]
    assert [record.outcomes for record in records] == [{"finished": 3}] * 4
    dry = run(ONE_SHOT, is_dry=True)
    for name in ("uplinks", "dense", "server", "forward", "relayed"):
        assert [getattr(r.exchange, name) for r in records] == [
            getattr(r.exchange, name) for r in dry
        ]


def test_a_run_that_is_killed_after_the_transfer_does_not_send_again(tmp_path):
    whole = run(ONE_SHOT)
    run(ONE_SHOT, folder=tmp_path, stop=2)
    resumed = run(ONE_SHOT, folder=tmp_path)
    assert [record.up for record in resumed] == [0, 0]
    assert resumed[-1].digest == whole[-1].digest


def test_a_client_that_comes_late_sends_late_and_one_that_leaves_is_still_learned_from():
    method = msgspec.structs.replace(ONE_SHOT, local_share=0.0)
    session = make_session(method)
    first = train(method, session, 0, rounds=4, available=[0, 1])
    second = train(method, session, 1, rounds=4, available=[2])
    assert [cost.uplinks for cost in first] == [3, 3, 0]
    assert [cost.uplinks for cost in second] == [0, 0, 1]
    assert [cost.samples for cost in second] == [2 * 24, 2 * 17, 2 * 8 + 8]  # visits of images


def test_the_server_s_work_is_recorded_although_some_clients_are_not_selected():
    settings = msgspec.structs.replace(make_settings(), per_round=2)
    records = run(ONE_SHOT, settings=settings)
    macs = make_session(ONE_SHOT).server_macs
    images = [record.exchange.server / macs / ONE_SHOT.passes for record in records]
    assert images[0] == 0
    assert images[-1] == sum(SIZES)
    assert images == sorted(images)  # absent or not, a client's activations stay in use


def test_a_rejected_client_is_left_out_and_gets_the_common_part():
    def corrupt(client, message):
        if client != 1:
            return message
        return replace(message, body=EXACT.encode(torch.full(message.shape, math.nan)))

    records = run(ONE_SHOT, make_client=make_faulty(corrupt))
    assert [record.exchange.uplinks for record in records] == [0, UPLINKS, 3, 3]  # it tries again
    macs = make_session(ONE_SHOT).server_macs
    assert records[-1].exchange.server == ONE_SHOT.passes * (24 + 8) * macs


def test_without_personal_rounds_all_clients_have_one_part():
    method = msgspec.structs.replace(ONE_SHOT, personal_share=0.0)
    session = make_session(method)
    for number in range(4):
        train(method, session, number, rounds=4)
    assert not session.server.copies
    assert session.server.effective_params(0) is session.server.effective_params(2)


def test_the_two_phases_of_clients_and_copies_must_fit_into_the_run():
    with pytest.raises(ValueError, match=r"at most 1 together, got 0\.75 and 0\.5"):
        OneShotSplit(local_share=0.75, personal_share=0.5)


def test_augmented_images_cannot_be_sent_once():
    local = msgspec.structs.replace(LOCAL, augment=CropFlip())
    with pytest.raises(ValueError, match="augmented images differ at every visit"):
        OneShotSplit(local=local)
