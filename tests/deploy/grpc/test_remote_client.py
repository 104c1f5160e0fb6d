"""Parts that a device sends: one that no honest device could have is not merged with others."""

import pytest
import torch
from tests.deploy.grpc_in_process import make_devices, make_experiment, run_with_devices

from pliant.deploy.grpc.device import SplitDevice
from pliant.deploy.grpc.remote_client import find_implausible_value
from pliant.engine.ledger import TaskRecord


def test_numbers_beyond_the_limit_are_named():
    part = {"bias": torch.tensor([0.5, -3.0]), "none": torch.zeros(0)}
    assert find_implausible_value(part, 3.0) is None
    assert find_implausible_value(part, 2.5) == "numbers up to 2.5 at 'bias', got 3"
    counter = {"count": torch.tensor([-(2**63)])}  # its absolute value does not fit into int64
    assert find_implausible_value(counter, 1e6) == "numbers up to 1e+06 at 'count', got 9.22337e+18"


def test_a_variance_below_zero_is_named():
    part = {"norm.running_mean": torch.tensor([-1.0]), "norm.running_var": torch.tensor([0.0])}
    assert find_implausible_value(part, 1e6) is None
    part["norm.running_var"] -= 0.25
    assert (
        find_implausible_value(part, 1e6) == "no variance below 0 at 'norm.running_var', got -0.25"
    )


class InflatingDevice(SplitDevice):
    """A device that replies to one kind of request with finite but senseless weights."""

    kind = "params"

    def _execute(self, request, tensors):
        result = super()._execute(request, tensors)
        if request.kind != self.kind:
            return result
        return {
            name: torch.full_like(tensor, 3e37) if name.endswith("weight") else tensor
            for name, tensor in result.items()
        }


@pytest.mark.parametrize(("kind", "rounds"), [("params", 1), ("state", 2)])
def test_a_device_with_a_senseless_part_is_named_and_left_out(kind, rounds, tmp_path):
    rules = {"late": "wait", "quorum": 1.0}  # wait until it has rejoined
    options = {"evaluation": {"every": 9}, "rules": rules}
    experiment = make_experiment(tmp_path, "splitfed", rounds=rounds, **options)
    devices = make_devices([0, 1], tmp_path) | make_devices([2], tmp_path, InflatingDevice)
    devices[2].kind = kind
    records = run_with_devices(
        experiment, tmp_path, devices=devices, pace="measured", allowance=30.0
    )
    tasks = [record for record in records if isinstance(record, TaskRecord)]
    reasons = [reason for task in tasks if task.device == 2 for reason in task.exchange.refused]
    assert reasons
    for reason in reasons:
        assert reason.startswith("client 2: expected numbers up to 1e+06 at '")
        assert reason.endswith("got 3e+37")
    outcomes = [task.outcome for task in tasks if task.device < 2]
    assert outcomes == ["finished"] * 2 * rounds
