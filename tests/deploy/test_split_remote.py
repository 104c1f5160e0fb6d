"""Parts that a device sends: one that no honest device could have is not merged with others'."""

import pytest
import torch
from split_near import described, devices_of, served

from pliant.deploy.split_device import SplitDevice
from pliant.deploy.split_remote import excess
from pliant.engine.ledger import TaskRecord


def test_numbers_beyond_the_guards_largest_are_named():
    part = {"bias": torch.tensor([0.5, -3.0]), "none": torch.zeros(0)}
    assert excess(part, 3.0) is None
    assert excess(part, 2.5) == "numbers up to 2.5 at 'bias', got 3"
    counter = {"count": torch.tensor([-(2**63)])}  # whose absolute value is no int64
    assert excess(counter, 1e6) == "numbers up to 1e+06 at 'count', got 9.22337e+18"


def test_a_variance_below_zero_is_named():
    part = {"norm.running_mean": torch.tensor([-1.0]), "norm.running_var": torch.tensor([0.0])}
    assert excess(part, 1e6) is None
    part["norm.running_var"] -= 0.25
    assert excess(part, 1e6) == "no variance below 0 at 'norm.running_var', got -0.25"


class Inflated(SplitDevice):
    """A device whose part is finite and senseless, where it is asked for it in this way."""

    kind = "params"

    def _do(self, question, tensors):
        found = super()._do(question, tensors)
        if question.kind != self.kind:
            return found
        return {
            name: torch.full_like(tensor, 3e37) if name.endswith("weight") else tensor
            for name, tensor in found.items()
        }


@pytest.mark.parametrize(("kind", "rounds"), [("params", 1), ("state", 2)])
def test_a_device_with_a_senseless_part_is_named_and_left_out(kind, rounds, tmp_path):
    experiment = described(tmp_path, "splitfed", rounds=rounds, evaluation={"every": 9})
    devices = devices_of([0, 1], tmp_path) | devices_of([2], tmp_path, Inflated)
    devices[2].kind = kind
    found = served(experiment, tmp_path, devices=devices, pace="measured", allowance=30.0)
    tasks = [task for task in found if isinstance(task, TaskRecord) and task.device == 2]
    told = [why for task in tasks for why in task.exchange.refused]
    assert told
    assert all(why.startswith("client 2: expected numbers up to 1e+06 at '") for why in told)
    assert all(why.endswith("got 3e+37") for why in told)
    rest = [task.end for task in found if isinstance(task, TaskRecord) and task.device < 2]
    assert rest == ["finished"] * 2 * rounds
