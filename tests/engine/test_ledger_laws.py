"""Laws of what a task costs, checked with the records and the numbers of the fleet alone."""

from itertools import pairwise, product

import msgspec
import pytest
from tests.engine.small_runs import LOCAL, SETTINGS, NoTraining, network, run

from pliant.devices import ChangingTrace, ConstantTrace, DeviceClass, Fleet
from pliant.engine.ledger import RoundRecord, TaskRecord, verify_records
from pliant.engine.round_rules import RoundRules, sample_dropout_times
from pliant.engine.run_store import read_records
from pliant.engine.split_ledger import build_task_records
from pliant.methods import Distreal, FedDropout
from pliant.params import get_params, nbytes
from pliant.split.base import ClientCosts

SIZE = nbytes(get_params(network()))
A, B = 3e-9, 2e-7  # joules per MAC and per byte
DOWN, UP, LATENCY = SIZE / 0.3, SIZE / 0.2, 0.02  # 0.32 s down and 0.22 s up
LINK = DeviceClass(down=DOWN, up=UP, latency=LATENCY, joules_per_mac=A, joules_per_byte=B)
SPEED = ChangingTrace(low=0.4, high=1.6, per_round=2.0)
FLEET = Fleet(size=12, speed=SPEED, classes=(LINK,))
METHODS = {
    "full": NoTraining(),
    "packed": FedDropout(local=LOCAL),
    "distreal": Distreal(None, LOCAL),
}
# methods that train get half of the rules each, with every pair of values
CASES = [
    (
        method,
        RoundRules(late=late, grace=grace, dropout=dropout, over_selection=1.0, close_early=early),
    )
    for late, grace, dropout, early in product(
        ("discard", "partial", "wait"), (0.0, 0.2), (0.0, 0.5), (False, True)
    )
    for method in ("full", "packed" if (grace > 0) ^ (dropout > 0) ^ early else "distreal")
]


def run_rounds(method, folder, rules, fleet=FLEET, rounds=4):
    """Run some rounds; return the tasks of each with its length."""
    run(
        method,
        fleet=fleet,
        folder=folder,
        settings=msgspec.structs.replace(SETTINGS, rounds=rounds, rules=rules),
    )
    records = list(read_records(folder))
    assert verify_records(records) == rounds
    ends = [0.0, *(record.seconds for record in records if isinstance(record, RoundRecord))]
    tasks = [record for record in records if isinstance(record, TaskRecord)]
    return [
        (end - start, [task for task in tasks if task.round == number])
        for number, (start, end) in enumerate(pairwise(ends))
    ]


@pytest.mark.parametrize(("method", "rules"), CASES, ids=str)
def test_a_task_costs_what_it_did_before_the_round_closed(method, rules, tmp_path):
    for length, tasks in run_rounds(METHODS[method], tmp_path, rules, rounds=2):
        for task in tasks:
            download = LATENCY + task.down / DOWN if task.down else 0.0
            upload = LATENCY + task.up / UP if task.up else 0.0
            assert download + task.seconds + upload <= length + 1e-6
            assert task.joules == pytest.approx(A * task.macs + B * (task.down + task.up))
            if task.starts:
                assert task.starts[0] == pytest.approx(download)
            if task.outcome in ("finished", "partial", "void"):
                assert task.up > 0
            if task.outcome in ("late", "dropped"):
                assert task.up == 0


def test_surplus_devices_are_not_charged_for_uploads_that_the_close_stopped(tmp_path):
    # no two devices have the same speed, so the fourth of eight closes the round before the fifth
    rules = RoundRules(over_selection=1.0, close_early=True)
    fleet = Fleet(size=12, speed=ConstantTrace(1.2, 4.0), classes=(LINK,))
    for _, tasks in run_rounds(NoTraining(), tmp_path, rules, fleet):
        assert sorted(task.outcome for task in tasks) == ["finished"] * 4 + ["surplus"] * 4
        assert all((task.up > 0) == (task.outcome == "finished") for task in tasks)


def test_a_device_that_leaves_during_its_download_is_charged_the_part_it_received(tmp_path):
    rules, seen = RoundRules(dropout=0.9), 0
    for number, (_, tasks) in enumerate(run_rounds(NoTraining(), tmp_path, rules, rounds=8)):
        for task in tasks:
            left = sample_dropout_times(
                rules, [task.device], seed=0, round=number, round_seconds=1.0
            )[0]
            if left < LATENCY + SIZE / DOWN:
                assert task.outcome == "dropped"
                assert task.starts == ()
                assert task.down == max(0, int((left - LATENCY) * DOWN))
                seen += 1
            else:
                assert task.down == SIZE
    assert seen > 3


def test_a_device_whose_download_the_close_stops_has_not_worked(tmp_path):
    slow = DeviceClass(share=1.0, down=SIZE / 0.9)
    fleet = Fleet(size=12, speed=ConstantTrace(5.0), classes=(DeviceClass(), slow))
    rules = RoundRules(over_selection=2.0, close_early=True)
    [(length, tasks)] = run_rounds(NoTraining(), tmp_path, rules, fleet, rounds=1)
    assert length == pytest.approx(0.2)
    stopped = [task for task in tasks if task.down < SIZE]
    assert len(stopped) > 2
    for task in stopped:
        assert (task.outcome, task.starts, task.seconds, task.macs) == ("surplus", (), 0.0, 0.0)
        assert task.down == int(length * SIZE / 0.9)


def test_a_split_client_cannot_hide_macs_that_it_had_no_time_for():
    costs = ClientCosts(macs=10.0, samples=4, steps=1)
    [task] = build_task_records(0, [costs], {0: 7.0}, Fleet(size=1).get_costs([0]))
    assert task.available == 7.0
    total = RoundRecord(0, 1.0, 1, 1, {"finished": 1}, 4, 1, 10.0, 10.0, 7.0, 0, 0, 0.0, 0.0)
    with pytest.raises(ValueError, match=r"spent 10.0 MACs of 7.0 available"):
        verify_records([task, total])
