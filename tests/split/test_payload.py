import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pliant.split.payload import NUMBERS, Payload, read_labels, write_labels

numbers = st.floats(-1000, 1000, width=32).map(lambda x: 0.0 if abs(x) < 1e-3 else x)
tensors = st.lists(numbers, max_size=40).map(torch.tensor)
forms = st.builds(Payload, st.sampled_from(["sent", "bitmap"]), st.sampled_from(sorted(NUMBERS)))


@given(tensors, forms)
def test_what_is_written_is_read_again(tensor, form):
    found = form.decode(form.encode(tensor), tuple(tensor.shape))
    largest = float(tensor.abs().max()) if len(tensor) else 0.0
    slack = {"float32": 0.0, "float16": 0.6, "int8": largest / 127 / 2 * 1.001}[form.number]
    assert torch.equal(found == 0, tensor == 0) or form.number == "int8"
    assert found.sub(tensor).abs().max().item() <= slack if len(tensor) else True


@given(tensors)
def test_a_bitmap_costs_a_bit_for_each_number_and_four_bytes_for_each_that_is_there(tensor):
    there = int(np.count_nonzero(tensor.numpy()))
    assert len(Payload().encode(tensor)) == -(-len(tensor) // 8) + 4 * there


@given(tensors, forms)
def test_bytes_that_are_cut_short_are_refused(tensor, form):
    body = form.encode(tensor)
    if body:
        with pytest.raises(ValueError, match="got"):
            form.decode(body[:-1], tuple(tensor.shape))


def test_dense_sizes():
    assert Payload(zeros="sent").dense(163_840) == 655_360  # specified for a batch of 32
    assert Payload().dense(163_840) == 655_360 + 20_480
    assert Payload("sent", "int8").dense(10) == 14


def test_int8_keeps_its_scale_in_front():
    body = Payload("sent", "int8").encode(torch.tensor([-127.0, 127.0, 1.0]))
    assert body == np.float32(1.0).tobytes() + np.array([-127, 127, 1], np.int8).tobytes()


def test_labels_take_a_byte_each_where_one_is_enough():
    labels = torch.tensor([3, 0, 255])
    assert write_labels(labels, 256) == b"\x03\x00\xff"
    assert read_labels(b"\x03\x00\xff", 256).tolist() == [3, 0, 255]
    assert len(write_labels(labels, 257)) == 12
