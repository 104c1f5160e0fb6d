from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn

from pliant.engine.copies import copied
from pliant.engine.job import Job
from pliant.engine.wire import decoded, message
from pliant.methods.base import Place, Update
from pliant.nn.subnet import Subnet
from pliant.value import Value


class Chosen(Value, frozen=True):
    width: float = 0.5


@dataclass(frozen=True)
class Secret:
    """A dataclass that is not copied field by field."""

    shown: int
    hidden: list[int] = field(default_factory=list)

    def __getstate__(self):
        return {"shown": self.shown, "hidden": []}


SUBNET = Subnet("net", (np.array([True, False]),), (2.0,))
VALUES = {
    "job": Job(Place(0, 1, 2), (0, 1), (1.5, 2.0), 0.1, {"m": torch.ones(2)}, 4, (1, 2)),
    "update": Update(3, {"w": torch.arange(6.0).reshape(2, 3).T}, 8, 2, 1.0, 0.5, SUBNET),
    "plain": [None, 1, 2.5, "text", b"raw", True, 1j, (1, [2, {"three": (4,)}])],
    "odd": {"value": Chosen(0.25), "exact": Fraction(1, 3), "set": {1, 2}},
    "empty": ({}, [], (), torch.empty(0), np.zeros((0, 3))),
    "state of its own": Secret(1, [2, 3]),
}


def same(left, right):
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right) and left.stride() == right.stride()
    if isinstance(left, np.ndarray):
        return np.array_equal(left, right) and left.dtype == right.dtype
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        pairs = zip(left, right, strict=True)
        return type(left) is type(right) and all(same(a, b) for a, b in pairs)
    if hasattr(left, "__dict__") and not isinstance(left, type):
        return type(left) is type(right) and same(vars(left), vars(right))
    return type(left) is type(right) and left == right


@pytest.mark.parametrize("name", sorted(VALUES))
def test_a_copy_is_what_another_process_would_get(name):
    assert same(copied(VALUES[name]), decoded(message(VALUES[name])))


def test_nothing_is_shared():
    job = Job(Place(0, 1, 2), (0,), (1.0,), 0.1, {"m": torch.zeros(2)})
    other = copied(job)
    other.memory["m"] += 1
    other.memory["n"] = torch.ones(1)
    assert job.memory.keys() == {"m"}
    assert job.memory["m"].tolist() == [0, 0]


@pytest.mark.parametrize("odd", [(), {1}])  # a set goes another way, through pickle
def test_what_was_one_stays_one(odd):
    tensor, shared = torch.zeros(2), [1]
    first, second, left, right, _ = copied((tensor, tensor, shared, shared, odd))
    assert first is second
    assert left is right
    assert first is not tensor


def test_a_ring_is_copied():
    ring: list[object] = [1]
    ring.append(ring)
    found = copied(ring)
    assert found[1] is found
    assert found is not ring


def test_parameters_and_networks_are_copied_too():
    net = nn.Linear(2, 1)
    found = copied({"net": net, "sparse": torch.eye(2).to_sparse()})
    assert torch.equal(found["net"].weight, net.weight)
    assert found["net"].weight.requires_grad
    assert found["net"].weight.data_ptr() != net.weight.data_ptr()
    assert found["sparse"].is_sparse
