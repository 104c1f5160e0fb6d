import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import nn

from pliant.workers.serialisation import ALIGNMENT, deserialise, serialise

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64]


@given(
    shape=arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4),
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
)
def test_a_tensor_arrives_with_its_bits_strides_and_alignment(shape, dtype, data):
    order = data.draw(st.permutations(range(len(shape))))
    sent = torch.arange(int(np.prod(shape))).to(dtype).reshape(shape).permute(order)
    received = deserialise(serialise({"tensor": sent}))["tensor"]
    assert received.dtype == sent.dtype
    assert received.stride() == sent.stride()
    assert torch.equal(received, sent)
    assert received.data_ptr() % ALIGNMENT == 0


def test_a_tensor_with_gaps_arrives_without_them():
    for sent in (torch.arange(8.0)[::2], torch.ones(1).expand(3), torch.randn(4, 4)[:, 1:3]):
        received = deserialise(serialise(sent))
        assert torch.equal(received, sent)
        assert received.is_contiguous()


def test_special_tensors_and_networks_arrive_too():
    net = nn.Linear(2, 3)
    received = deserialise(serialise(net))
    assert torch.equal(received.weight, net.weight)
    assert received.weight.requires_grad
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(deserialise(serialise(sparse)).to_dense(), torch.eye(3))
    view = torch.ones(2, dtype=torch.complex64).conj()
    assert torch.equal(deserialise(serialise(view)), view)


def test_the_received_value_is_a_writable_copy():
    sent = {"tensor": torch.zeros(3), "array": np.zeros(3)}
    received = deserialise(serialise(sent))
    received["tensor"] += 1
    received["array"] += 1
    assert sent["tensor"].sum() == sent["array"].sum() == 0


def test_without_copies_tensors_are_views_of_the_message():
    message = bytearray(serialise([torch.zeros(3)]))
    deserialise(message, copy=False)[0].fill_(1)
    assert deserialise(message)[0].tolist() == [1, 1, 1]


def test_keeping_one_tensor_does_not_keep_the_message():
    small, _ = deserialise(serialise([torch.zeros(3), torch.zeros(1000)]))
    assert small.untyped_storage().nbytes() == 12


@pytest.mark.parametrize("value", [None, 7, "text", [1, (2, {"three": 4})]])
def test_plain_values_arrive(value):
    assert deserialise(serialise(value)) == value
