from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn

from pliant.engine.local_work import Job
from pliant.methods.base import TaskKey, Update
from pliant.methods.scaffold import ScaffoldDeviceState
from pliant.nn.subnet import Subnet
from pliant.value import Value
from pliant.workers.isolated_copy import copy_isolated
from pliant.workers.serialisation import deserialise, serialise


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


def test_parameters_and_networks_are_copied_too():
    net = nn.Linear(2, 1)
    copy = copy_isolated({"net": net, "sparse": torch.eye(2).to_sparse()})
    assert torch.equal(copy["net"].weight, net.weight)
    assert copy["net"].weight.requires_grad
    assert copy["net"].weight.data_ptr() != net.weight.data_ptr()
    assert copy["sparse"].is_sparse
