"""Rejected updates do not count towards the quorum of a round."""

from dataclasses import dataclass, replace

import pytest
import torch
from msgspec import structs
from tests.engine.small_runs import SETTINGS, StatefulFedAvg, data, load_records, network

from pliant.devices import Fleet
from pliant.engine.ledger import RoundRecord, TaskRecord, verify_records
from pliant.engine.round_rules import RoundRules
from pliant.engine.run_store import load_trained_params
from pliant.engine.simulate import simulate
from pliant.params import digest, get_params


@dataclass(frozen=True)
class PartlyFaulty(StatefulFedAvg):
    """Some devices send NaN."""

    faulty: frozenset[int] = frozenset()

    def train(self, net, task, steps):
        update = super().train(net, task, steps)
        if task.key.device not in self.faulty:
            return update
        return replace(update, delta={n: t * torch.nan for n, t in update.delta.items()})


def run(folder, faulty, quorum):
    settings = structs.replace(SETTINGS, rounds=2, per_round=4, rules=RoundRules(quorum=quorum))
    fleet = Fleet(size=4)  # all devices are selected and in time
    method = PartlyFaulty(faulty=frozenset(faulty))
    for _ in simulate(method, network(), data(4), fleet, settings=settings, folder=folder):
        pass
    records = load_records(folder)
    assert verify_records(records) == 2
    tasks = [record for record in records if isinstance(record, TaskRecord)]
    totals = [record for record in records if isinstance(record, RoundRecord)]
    return tasks, totals, digest(load_trained_params(folder))


def test_with_too_few_valid_updates_a_round_is_void(tmp_path):
    tasks, totals, trained = run(tmp_path, {0, 2}, quorum=0.75)
    assert [task.outcome.partition(":")[0] for task in tasks] == ["rejected", "void"] * 4
    assert [total.merged for total in totals] == [0, 0]
    assert totals[0].outcomes == {"rejected": 2, "void": 2}
    assert all(task.useful == task.steps == task.samples == 0 for task in tasks)
    assert all(task.macs > 0 and task.up > 0 for task in tasks)  # the work was done all the same
    assert trained == digest(get_params(network()))


@pytest.mark.parametrize(("faulty", "quorum"), [({0, 2}, 0.5), ({0}, 0.75), (set(), 1.0)])
def test_with_enough_valid_updates_the_others_are_merged(tmp_path, faulty, quorum):
    tasks, totals, trained = run(tmp_path, faulty, quorum)
    assert [total.merged for total in totals] == [4 - len(faulty)] * 2
    assert {task.device for task in tasks if task.outcome == "finished"} == {0, 1, 2, 3} - faulty
    assert trained != digest(get_params(network()))
