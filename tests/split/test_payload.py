import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pliant.split.payload import DTYPES, Payload, decode_labels, encode_labels

numbers = st.floats(-1000, 1000, width=32).map(lambda x: 0.0 if abs(x) < 1e-3 else x)
tensors = st.lists(numbers, max_size=40).map(torch.tensor)
payloads = st.builds(Payload, st.sampled_from(["sent", "bitmap"]), st.sampled_from(sorted(DTYPES)))


@given(tensors, payloads)
def test_an_encoded_tensor_can_be_decoded(tensor, payload):
    decoded = payload.decode(payload.encode(tensor), tuple(tensor.shape))
    largest = float(tensor.abs().max()) if len(tensor) else 0.0
    slack = {"float32": 0.0, "float16": 0.6, "int8": largest / 127 / 2 * 1.001}[payload.dtype]
    assert torch.equal(decoded == 0, tensor == 0) or payload.dtype == "int8"
    assert decoded.sub(tensor).abs().max().item() <= slack if len(tensor) else True


@given(tensors)
def test_a_bitmap_costs_one_bit_per_number_and_four_bytes_per_nonzero_one(tensor):
    nonzero = int(np.count_nonzero(tensor.numpy()))
    assert len(Payload().encode(tensor)) == -(-len(tensor) // 8) + 4 * nonzero


@given(tensors, payloads)
def test_truncated_bytes_are_rejected(tensor, payload):
    body = payload.encode(tensor)
    if body:
        with pytest.raises(ValueError, match="got"):
            payload.decode(body[:-1], tuple(tensor.shape))


def test_dense_sizes():
    batch = (32, 20, 16, 16)
    assert Payload(zeros="sent").dense_size(batch) == 655_360  # as specified
    assert Payload().dense_size(batch) == 655_360 + 20_480
    assert Payload("sent", "int8").dense_size((10,)) == 14
    assert Payload("sent", "int8", columns=0.3).dense_size((2, 5, 2)) == 2 + 4 + 2 * 3


@st.composite
def matrices(draw):
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 20))
    entries = draw(st.lists(numbers, min_size=rows * columns, max_size=rows * columns))
    return torch.tensor(entries).reshape(rows, columns)


@given(matrices(), payloads, st.floats(0.05, 0.95))
def test_only_the_features_that_differ_most_between_images_are_sent(matrix, payload, share):
    chosen = Payload(payload.zeros, payload.dtype, share)
    body, shape = chosen.encode(matrix), tuple(matrix.shape)
    is_sent = chosen.read_columns(body, shape)
    assert int(is_sent.sum()) == math.ceil(share * shape[1] - 1e-9)
    deviations, mask = matrix.double().numpy().std(axis=0), is_sent.numpy()
    assert deviations[mask].min() >= deviations[~mask].max(initial=0.0) - 1e-6
    rest = payload.encode(matrix[:, is_sent])
    assert body[-(-shape[1] // 8) :] == rest
    decoded = chosen.decode(body, shape)
    assert not decoded[:, ~is_sent].any()
    assert torch.equal(decoded[:, is_sent], payload.decode(rest, (shape[0], int(is_sent.sum()))))
    if payload.zeros == "sent":
        assert len(body) == chosen.dense_size(shape)


def test_a_message_with_other_numbers_of_features_is_rejected():
    half, more = Payload("sent", columns=0.5), Payload("sent", columns=0.75)
    with pytest.raises(ValueError, match="2 of 4 features, got 3"):
        half.decode(more.encode(torch.eye(4)), (4, 4))


def test_an_int8_tensor_starts_with_its_scale():
    body = Payload("sent", "int8").encode(torch.tensor([-127.0, 127.0, 1.0]))
    assert body == np.float32(1.0).tobytes() + np.array([-127, 127, 1], np.int8).tobytes()


def test_labels_take_one_byte_each_if_that_is_enough():
    labels = torch.tensor([3, 0, 255])
    assert encode_labels(labels, 256) == b"\x03\x00\xff"
    assert decode_labels(b"\x03\x00\xff", 256).tolist() == [3, 0, 255]
    assert len(encode_labels(labels, 257)) == 12
