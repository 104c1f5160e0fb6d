"""What the guard refuses does not count towards the quorum of a round."""

from dataclasses import dataclass, replace

import pytest
import torch
from msgspec import structs
from small import SETTING, Remembering, data, events, network

from pliant.devices import Fleet
from pliant.engine.ledger import RoundRecord, TaskRecord, check
from pliant.engine.rules import Rules
from pliant.engine.simulate import simulate, trained
from pliant.params import digest, params_of


@dataclass(frozen=True)
class Lying(Remembering):
    """Some devices send numbers that are none."""

    liars: frozenset[int] = frozenset()

    def train(self, net, task, steps):
        update = super().train(net, task, steps)
        if task.place.device not in self.liars:
            return update
        return replace(update, change={n: t * torch.nan for n, t in update.change.items()})


def ran(folder, liars, quorum):
    setting = structs.replace(SETTING, rounds=2, per_round=4, rules=Rules(quorum=quorum))
    fleet = Fleet(size=4)  # all are selected, and all are in time
    method = Lying(liars=frozenset(liars))
    for _ in simulate(method, network(), data(4), fleet, setting=setting, folder=folder):
        pass
    records = events(folder)
    assert check(records) == 2
    tasks = [record for record in records if isinstance(record, TaskRecord)]
    totals = [record for record in records if isinstance(record, RoundRecord)]
    return tasks, totals, digest(trained(folder))


def test_with_too_few_valid_updates_a_round_is_void(tmp_path):
    tasks, totals, found = ran(tmp_path, {0, 2}, quorum=0.75)
    assert [task.end.partition(":")[0] for task in tasks] == ["rejected", "void"] * 4
    assert [total.merged for total in totals] == [0, 0]
    assert totals[0].ends == {"rejected": 2, "void": 2}
    assert all(task.useful == task.steps == task.samples == 0 for task in tasks)
    assert all(task.macs > 0 and task.up > 0 for task in tasks)  # they have worked all the same
    assert found == digest(params_of(network()))


@pytest.mark.parametrize(("liars", "quorum"), [({0, 2}, 0.5), ({0}, 0.75), (set(), 1.0)])
def test_with_enough_valid_updates_the_others_are_merged(tmp_path, liars, quorum):
    tasks, totals, found = ran(tmp_path, liars, quorum)
    assert [total.merged for total in totals] == [4 - len(liars)] * 2
    assert {task.device for task in tasks if task.end == "finished"} == {0, 1, 2, 3} - liars
    assert found != digest(params_of(network()))
