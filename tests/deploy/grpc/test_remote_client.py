"""Parts that a device sends: one that no honest device could have is not merged with others."""

import pytest
import torch
from tests.deploy.grpc_in_process import (
    connect_devices,
    make_devices,
    make_experiment,
    make_server_run,
    run_with_devices,
)

from pliant.deploy.grpc.device import SplitDevice
from pliant.deploy.grpc.remote_client import (
    clip_change,
    iter_change_problems,
    iter_part_problems,
)
from pliant.engine.ledger import TaskRecord
from pliant.methods.validation import ValidationPolicy
from pliant.params import clone


def find_problems(part, max_abs, expected=None):
    return list(iter_part_problems(part, part if expected is None else expected, max_abs))


def test_numbers_beyond_the_limit_are_named():
    part = {"bias": torch.tensor([0.5, -3.0]), "none": torch.zeros(0)}
    assert find_problems(part, 3.0) == []
    assert find_problems(part, 2.5) == ["part 'bias' of numbers up to 2.5, got 3"]
    counter = {"count": torch.tensor([-(2**63)])}  # its absolute value does not fit into int64
    assert find_problems(counter, 1e6) == ["part 'count' of numbers up to 1e+06, got 9.22337e+18"]


def test_a_part_of_another_network_is_named():
    part, other = {"bias": torch.zeros(2)}, {"bias": torch.zeros(3)}
    assert find_problems(part, 1.0, other) == ["part 'bias' of shape (3,), got (2,)"]
    assert find_problems(part, 1.0, {}) == ["no other part tensors, got 'bias'"]
    assert find_problems({}, 1.0, other) == ["part 'bias', got none"]


def test_a_part_must_be_finite():
    part = {"bias": torch.tensor([9.0]) / 0}
    assert find_problems(part, 1e6) == ["part 'bias' of finite numbers, got 1 that are not"]


def test_a_variance_below_zero_is_named():
    part = {"norm.running_mean": torch.tensor([-1.0]), "norm.running_var": torch.tensor([0.0])}
    assert find_problems(part, 1e6) == []
    part["norm.running_var"] -= 0.25
    assert find_problems(part, 1e6) == ["no variance below 0 at 'norm.running_var', got -0.25"]


class InflatingDevice(SplitDevice):
    """A device that sends finite but senseless weights."""

    value = 3e37

    def _execute(self, request, tensors):
        reply, result = super()._execute(request, tensors)
        if request.kind != "params":
            return reply, result
        return reply, {
            name: torch.full_like(tensor, self.value) if name.endswith("weight") else tensor
            for name, tensor in result.items()
        }


@pytest.mark.parametrize(
    ("rounds", "value", "reason"),
    [
        (2, 3e37, "of numbers up to 1e+06, got 3e+37"),
        (1, -9e5, "of numbers up to 100, got 900000"),
    ],
)
def test_a_device_with_a_senseless_part_is_named_and_left_out(rounds, value, reason, tmp_path):
    rules = {"late": "wait", "quorum": 1.0}  # wait until it has rejoined
    options = {"evaluation": {"every": 9}, "rules": rules}
    experiment = make_experiment(tmp_path, "splitfed", rounds=rounds, **options)
    devices = make_devices([0, 1], tmp_path) | make_devices([2], tmp_path, InflatingDevice)
    devices[2].value = value
    records = run_with_devices(
        experiment, tmp_path, devices=devices, pace="measured", allowance=30.0
    )
    tasks = [record for record in records if isinstance(record, TaskRecord)]
    reasons = [reason for task in tasks if task.device == 2 for reason in task.exchange.refused]
    assert reasons
    for found in reasons:
        assert found.startswith("client 2: expected part '")
        assert found.endswith(reason)
    assert any(task.outcome.startswith("rejected") for task in tasks if task.device == 2)
    outcomes = [task.outcome for task in tasks if task.device < 2]
    assert outcomes == ["finished"] * 2 * rounds


def test_a_round_that_rejects_everybody_leaves_the_server_as_it_was(tmp_path):
    options = {"evaluation": {"every": 9}, "rules": {"late": "wait"}}
    experiment = make_experiment(tmp_path, "splitfed", rounds=1, **options)
    server_run = make_server_run(experiment, pace="measured", allowance=30.0)
    start = clone(server_run._session.server.state_dict())
    devices = make_devices(range(3), tmp_path, InflatingDevice)
    with connect_devices(devices, server_run.grpc_server.port, tmp_path):
        [record] = server_run.run_rounds(tmp_path / "run")
    assert record.merged == 0
    state = server_run._session.server.state_dict()
    assert all(torch.equal(state[name], start[name]) for name in start)


PART = {"bias": torch.tensor([3.0, 4.0]), "count": torch.tensor(7)}
START = {"bias": torch.zeros(2), "count": torch.tensor(0)}


def test_a_change_is_bounded_or_clipped_by_the_policy():
    assert list(iter_change_problems(PART, START, ValidationPolicy(norm=5.0))) == []
    [problem] = iter_change_problems(PART, START, ValidationPolicy(norm=4.0))
    assert problem == "a part that changes by at most 4, got 5"
    policy = ValidationPolicy(norm=1.0, clip=True)
    assert list(iter_change_problems(PART, START, policy)) == []
    clipped = clip_change(PART, START, policy)
    assert torch.allclose(clipped["bias"], torch.tensor([0.6, 0.8]))
    assert clipped["count"] == 7
    assert clip_change(PART, START, ValidationPolicy(norm=5.0, clip=True)) is None
