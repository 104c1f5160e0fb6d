import pytest
import torch

from pliant.deploy.messages import (
    PARAMS,
    MalformedMessage,
    SharedEncoder,
    TrainReply,
    TrainRequest,
    decode_message,
    encode_message,
    list_buffers,
)
from pliant.params import select_subtree


def test_a_request_survives_encoding():
    request = TrainRequest("train", {"a": [1, 2]}, 3, 7, 0.1, row=2, macs=5.0)
    raw = encode_message(request, {"params": {"a.weight": torch.arange(3.0)}})
    header, tensors = decode_message(raw, TrainRequest)
    assert header == request
    assert tensors["params/a.weight"].tolist() == [0.0, 1.0, 2.0]


def test_a_reply_survives_encoding():
    reply = TrainReply("update", 3, 7, rows=(1, 2), times=(0.0, 0.5, 1.0), curve=((0.5, 0.1),))
    assert decode_message(encode_message(reply), TrainReply)[0] == reply


@pytest.mark.parametrize("size", [0, 1, 39, 40, 41, 100])
def test_a_truncated_message_is_refused(size):
    raw = encode_message(TrainReply("update", 3), {"change": {"weight": torch.ones(100)}})
    with pytest.raises(MalformedMessage):
        decode_message(raw[:size], TrainReply)


def test_a_message_with_any_byte_changed_is_refused():
    raw = encode_message(TrainReply("update", 3), {"change": {"weight": torch.ones(4)}})
    for index in range(len(raw)):
        bad = raw[:index] + bytes([raw[index] ^ 255]) + raw[index + 1 :]
        with pytest.raises(MalformedMessage):
            decode_message(bad, TrainReply)


@pytest.mark.parametrize(
    "header", [None, [], {"kind": "gift"}, {"kind": "update", "device": "one"}]
)
def test_a_header_of_another_form_is_refused(header):
    from pliant.storage import checkpoint

    with pytest.raises(MalformedMessage):
        decode_message(checkpoint.to_bytes({}, header), TrainReply)


def test_tensors_for_many_devices_are_encoded_once_and_arrive_with_each_header():
    encoder, params = SharedEncoder(), {"w": torch.arange(6.0).reshape(2, 3)}
    requests = [TrainRequest("train", {}, device) for device in range(3)]
    messages = [encoder.encode(request, {PARAMS: dict(params)}) for request in requests]
    assert len({id(message.tensors) for message in messages}) == 1
    other = encoder.encode(requests[0], {PARAMS: {"w": params["w"] + 1}})
    assert other.tensors != messages[0].tensors
    for request, message in zip(requests, messages, strict=True):
        assert b"".join(list_buffers(message)) == bytes(message)
        assert len(bytes(message)) == len(message)
        header, tensors = decode_message(bytes(message), TrainRequest)
        assert header == request
        assert torch.equal(select_subtree(tensors, PARAMS)["w"], params["w"])
    raw = bytes(messages[0])
    for damaged in (raw[:9], raw[:-1], raw[: len(messages[0].head)], raw[:40] + b"x" + raw[41:]):
        with pytest.raises(MalformedMessage):
            decode_message(damaged, TrainRequest)
