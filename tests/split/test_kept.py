"""Activations that are sent once and kept by the server."""

import math
from contextlib import closing
from dataclasses import replace

import msgspec
import pytest
import torch
from tests.split.small_split import (
    LOCAL,
    make_data,
    make_faulty,
    make_network,
    run,
)
from torch import nn

from pliant.data import CropFlip
from pliant.devices import Fleet
from pliant.engine.run_store import RunStore
from pliant.engine.split_loop import SplitClientState, SplitState
from pliant.split import AdaSplit
from pliant.split.payload import Payload
from pliant.split.session import Session

SIZES = (24, 16, 8)
BYTES = 4 * 4 * 8 * 8 * sum(SIZES)
MASKS_ONLY = AdaSplit(local=LOCAL, objective="none", kappa=0.0, eta=1.0)
SENT_ONCE = msgspec.structs.replace(MASKS_ONLY, send_once=BYTES)


def test_one_pass_of_traffic_and_of_compute_gives_the_same_result(tmp_path):
    data = make_data(SIZES)
    once, always = run(SENT_ONCE, data=data, folder=tmp_path), run(MASKS_ONLY, data=data)
    assert once[-1].digest == always[-1].digest
    assert [record.loss for record in once] == [record.loss for record in always]
    assert [record.samples for record in once] == [record.samples for record in always]
    assert [record.exchange.uplinks for record in once] == [3 + 2 + 1, 0, 0, 0]
    assert once[0].macs == always[0].macs * sum(SIZES) / always[0].samples
    assert [record.macs for record in once[1:]] == [0, 0, 0]
    assert [record.outcomes for record in once] == [{"finished": 3}] * 4
    assert once[-1].seconds < 0.5 * always[-1].seconds
    with closing(RunStore(tmp_path)) as store:
        state = store.resume(SplitState, SplitClientState)
    assert list(state.server_state.method_state) == ["bandit"]  # no activations are left


def test_a_resumed_run_does_not_send_them_again(tmp_path):
    data = make_data(SIZES)
    whole = run(SENT_ONCE, data=data)
    run(SENT_ONCE, data=data, folder=tmp_path, stop=2)
    resumed = run(SENT_ONCE, data=data, folder=tmp_path)
    assert [record.up for record in resumed] == [0, 0]
    assert resumed[-1].digest == whole[-1].digest


def test_a_rejected_mini_batch_is_sent_again():
    broken = []

    def break_first(client, message):
        if client == 1 and not broken:
            broken.append(message)
            return replace(message, body=Payload().encode(torch.full(message.shape, math.nan)))
        return message

    records = run(SENT_ONCE, data=make_data(SIZES), make_client=make_faulty(break_first))
    assert records[0].exchange.uplinks > 3 + 2 + 1
    assert [record.up for record in records[2:]] == [0, 0]


def test_activations_are_saved_although_the_round_before_was_rolled_back(tmp_path):
    """All nine messages of the first round are rejected."""
    count = iter(range(1000))
    fault = make_faulty(lambda client, message: {} if next(count) < 9 else message)
    data = make_data(SIZES)
    records = run(SENT_ONCE, data=data, make_client=fault, folder=tmp_path, stop=2)
    records += run(SENT_ONCE, data=data, folder=tmp_path)
    assert [record.exchange.uplinks for record in records] == [9, 3 + 2 + 1, 0, 0]


def test_a_dry_run_sends_them_once_too():
    records, dry = (run(SENT_ONCE, data=make_data(SIZES), is_dry=is_dry) for is_dry in (0, 1))
    for name in ("uplinks", "dense", "server", "forward"):
        assert [getattr(r.exchange, name) for r in records] == [
            getattr(r.exchange, name) for r in dry
        ]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"objective": "contrast"}, "got trained clients"),
        ({"gradient": True}, "got trained clients"),
        ({"relay": True}, "got relay"),
        (
            {"local": msgspec.structs.replace(LOCAL, augment=CropFlip())},
            "augmented images differ at every visit",
        ),
    ],
)
def test_activations_that_change_are_not_sent_once(fields, reason):
    with pytest.raises(ValueError, match=reason):
        AdaSplit(**{"objective": "none", "send_once": BYTES} | fields)


def test_more_activations_than_the_limit_are_refused():
    method = msgspec.structs.replace(SENT_ONCE, send_once=BYTES - 1)
    with pytest.raises(ValueError, match=f"at least {BYTES} bytes .* got {BYTES - 1}"):
        run(method, data=make_data(SIZES))


def test_a_part_with_batch_norm_is_refused():
    net = make_network()
    net.stage1 = nn.Sequential(*net.stage1, nn.BatchNorm2d(4))
    with pytest.raises(ValueError, match="got BatchNorm2d at 'stage1"):
        Session(SENT_ONCE, net, make_data(SIZES), Fleet(size=3), seed=0)
