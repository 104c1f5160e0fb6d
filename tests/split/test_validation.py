import math
from dataclasses import replace

import pytest
import torch
from tests.split.small_split import ADASPLIT, make_faulty, run

from pliant.split import SplitFed, VanillaSplit
from pliant.split.payload import Message, Payload
from pliant.split.validation import MessageManifest, decode_message

DENSE = Payload(zeros="sent")
MANIFEST = MessageManifest(2, (2, 3), 5, frozenset({1, 4}), DENSE, max_abs=1e6)
GOOD = Message((2, 3), DENSE.encode(torch.ones(2, 3)), b"\x01\x04")


def insert_number(number):
    return replace(GOOD, body=DENSE.encode(torch.tensor([1.0, 1, 1, 1, 1, number])))


def test_a_good_message_is_decoded():
    activations, labels = decode_message(GOOD, MANIFEST)
    assert torch.equal(activations, torch.ones(2, 3))
    assert labels.tolist() == [1, 4]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (insert_number(math.nan), "activations of finite numbers, got NaN"),
        (insert_number(-math.inf), "activations of finite numbers, got an infinity"),
        (insert_number(1e30), "activations up to 1e+06, got 1e+30"),
        (replace(GOOD, shape=(3, 2)), "activations of shape (2, 3), got (3, 2)"),
        (replace(GOOD, body=GOOD.body[:-1]), "activations in 24 bytes, got 23"),
        (replace(GOOD, labels=b"\x01"), "2 labels, got 1"),
        (replace(GOOD, labels=b"\x01\x09"), "labels of its classes, got 9"),
        (replace(GOOD, labels=b"\x01\x02"), "labels of its classes, got 2"),
        (replace(GOOD, body=None), "a readable message, got TypeError while reading it"),
        (None, "a message, got NoneType"),
        ({"shape": (2, 3)}, "a message, got dict"),
    ],
)
def test_a_bad_message_is_rejected_with_a_reason(message, reason):
    assert decode_message(message, MANIFEST) == f"client 2: expected {reason}"


def corrupt_message(client, message):
    if client != 1:
        return message
    return replace(message, body=Payload().encode(torch.full(message.shape, math.nan)))


@pytest.mark.parametrize("method", [ADASPLIT, VanillaSplit(local=ADASPLIT.local)])
def test_a_run_continues_without_a_client_that_sends_nan(method, tmp_path):
    records = run(method, make_client=make_faulty(corrupt_message), folder=tmp_path)
    reasons = {reason for record in records for reason in record.exchange.refused}
    assert reasons == {"client 1: expected activations of finite numbers, got NaN"}
    assert len(records) == 4
    assert records[-1].outcomes["rejected"] == 1
    assert records[-1].merged == 2
    assert records[-1].loss is not None


@pytest.mark.parametrize("version", [1, 2])
def test_a_rejected_message_does_not_change_the_server(version):
    method = SplitFed(local=ADASPLIT.local, version=version)
    records = run(method, make_client=make_faulty(lambda client, message: {}), stop=4)
    assert all(record.merged == 0 and record.loss is None for record in records)
    assert records[1].personal == records[3].personal
