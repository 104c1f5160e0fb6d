import math
from dataclasses import replace

import pytest
import torch
from little import ADASPLIT, run

from pliant.split import Split, SplitFed
from pliant.split.guard import Manifest, received
from pliant.split.payload import Message, Payload

PLAIN = Payload(zeros="sent")
WANTED = Manifest(2, (2, 3), 5, frozenset({1, 4}), PLAIN, largest=1e6)
GOOD = Message((2, 3), PLAIN.encode(torch.ones(2, 3)), b"\x01\x04")


def with_number(number):
    return replace(GOOD, body=PLAIN.encode(torch.tensor([1.0, 1, 1, 1, 1, number])))


def test_a_good_message_is_read():
    activations, labels = received(GOOD, WANTED)
    assert torch.equal(activations, torch.ones(2, 3))
    assert labels.tolist() == [1, 4]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (with_number(math.nan), "activations of finite numbers, got NaN"),
        (with_number(-math.inf), "activations of finite numbers, got an infinity"),
        (with_number(1e30), "activations up to 1e+06, got 1e+30"),
        (replace(GOOD, shape=(3, 2)), "activations of shape (2, 3), got (3, 2)"),
        (replace(GOOD, body=GOOD.body[:-1]), "activations in 24 bytes, got 23"),
        (replace(GOOD, labels=b"\x01"), "2 labels, got 1"),
        (replace(GOOD, labels=b"\x01\x09"), "labels of its classes, got 9"),
        (replace(GOOD, labels=b"\x01\x02"), "labels of its classes, got 2"),
        (replace(GOOD, body=None), "a message that can be read, got TypeError in reading it"),
        (None, "a message, got NoneType"),
        ({"shape": (2, 3)}, "a message, got dict"),
    ],
)
def test_bad_messages_are_refused_by_name(message, reason):
    assert received(message, WANTED) == f"client 2: expected {reason}"


def nan_from(client):
    def wire(sender, message):
        if sender != client:
            return message
        return replace(message, body=Payload().encode(torch.full(message.shape, math.nan)))

    return wire


@pytest.mark.parametrize("method", [ADASPLIT, Split(local=ADASPLIT.local)])
def test_a_run_goes_on_without_a_client_that_sends_nan(method, tmp_path):
    records = run(method, wire=nan_from(1), folder=tmp_path)
    refused = {}
    for record in records:
        refused |= record.exchange.refused
    assert list(refused) == ["client 1: expected activations of finite numbers, got NaN"]
    assert len(records) == 4
    assert records[-1].ends["rejected"] == 1
    assert records[-1].merged == 2
    assert records[-1].loss is not None


@pytest.mark.parametrize("version", [1, 2])
def test_the_server_is_as_if_a_refused_message_had_never_come(version):
    """All messages refused: the server's weights, and with them accuracy, stay as they were."""
    method = SplitFed(local=ADASPLIT.local, version=version)
    records = run(method, wire=lambda client, message: None, most=4)
    assert all(record.merged == 0 and record.loss is None for record in records)
    assert records[1].personal == records[3].personal
