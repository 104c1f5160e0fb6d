from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import nn

from pliant.engine.local_work import Job
from pliant.methods.base import TaskKey, Update
from pliant.methods.scaffold import ScaffoldDeviceState
from pliant.nn.subnet import Subnet, make_full_masks
from pliant.value import Value
from pliant.workers.serialisation import ALIGNMENT, copy_isolated, deserialise, serialise

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


class Width(Value, frozen=True):
    value: float = 0.5


@dataclass(frozen=True)
class CustomState:
    """A dataclass that is not copied field by field."""

    public: int
    hidden: list[int] = field(default_factory=list)

    def __getstate__(self):
        return {"public": self.public, "hidden": []}


SUBNET = Subnet("net", (np.array([True, False]),), (2.0,))
VALUES = {
    "job": Job(TaskKey(0, 1, 2), (0, 1), (1.5, 2.0), 0.1, {"m": torch.ones(2)}, 4, (1, 2)),
    "update": Update(3, {"w": torch.arange(6.0).reshape(2, 3).T}, 8, 2, 1.0, 0.5, SUBNET),
    "plain": [None, 1, 2.5, "text", b"raw", True, 1j, (1, [2, {"three": (4,)}])],
    "odd": {"value": Width(0.25), "exact": Fraction(1, 3), "set": {1, 2}},
    "empty": ({}, [], (), torch.empty(0), np.zeros((0, 3))),
    "custom state": CustomState(1, [2, 3]),
}


def is_same(left, right):
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right) and left.stride() == right.stride()
    if isinstance(left, np.ndarray):
        return np.array_equal(left, right) and left.dtype == right.dtype
    if isinstance(left, dict):
        return list(left) == list(right) and all(is_same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        pairs = zip(left, right, strict=True)
        return type(left) is type(right) and all(is_same(a, b) for a, b in pairs)
    if hasattr(left, "__dict__") and not isinstance(left, type):
        return type(left) is type(right) and is_same(vars(left), vars(right))
    return type(left) is type(right) and left == right


@pytest.mark.parametrize("name", sorted(VALUES))
def test_a_copy_is_what_another_process_would_get(name):
    assert is_same(copy_isolated(VALUES[name]), deserialise(serialise(VALUES[name])))


def test_a_copy_shares_nothing():
    job = Job(TaskKey(0, 1, 2), (0,), (1.0,), 0.1, ScaffoldDeviceState({"m": torch.zeros(2)}))
    copy = copy_isolated(job)
    copy.device_state.control["m"] += 1
    copy.device_state.control["n"] = torch.ones(1)
    assert job.device_state.control.keys() == {"m"}
    assert job.device_state.control["m"].tolist() == [0, 0]


def test_what_cannot_change_is_not_copied():
    constant = Subnet("net", make_full_masks((3, 2)), (1.0, 1.0))
    assert copy_isolated(constant) is constant
    changing = np.zeros(2, np.bool_)
    view = changing.view()
    view.flags.writeable = False  # but not what it shows
    for array in (changing, view):
        copy = copy_isolated(Subnet("net", (array,), (1.0,)))
        assert not np.shares_memory(copy.masks[0], array)


@pytest.mark.parametrize("odd", [(), {1}])  # a set is copied by pickle
def test_an_object_that_occurs_twice_is_copied_once(odd):
    tensor, shared = torch.zeros(2), [1]
    first, second, left, right, _ = copy_isolated((tensor, tensor, shared, shared, odd))
    assert first is second
    assert left is right
    assert first is not tensor


def test_a_cycle_is_copied():
    cycle: list[object] = [1]
    cycle.append(cycle)
    copy = copy_isolated(cycle)
    assert copy[1] is copy
    assert copy is not cycle


def test_a_dict_in_itself_is_copied():
    cycle: dict[str, object] = {"tensor": torch.zeros(1)}
    cycle["self"] = (cycle,)
    copy = copy_isolated(cycle)
    assert copy["self"][0] is copy
    assert copy["tensor"] is not cycle["tensor"]


def test_parameters_and_networks_are_copied_too():
    net = nn.Linear(2, 1)
    copy = copy_isolated({"net": net, "sparse": torch.eye(2).to_sparse()})
    assert torch.equal(copy["net"].weight, net.weight)
    assert copy["net"].weight.requires_grad
    assert copy["net"].weight.data_ptr() != net.weight.data_ptr()
    assert copy["sparse"].is_sparse
