import numpy as np
import pytest
from small import events, run

from pliant.devices import Constant, Fleet, PerBatch, PerRound, Rows
from pliant.engine.schedule import timetable
from pliant.engine.tasks import tasks
from pliant.methods import Distreal, Local


@pytest.mark.parametrize("plan", [PerBatch, PerRound])
@pytest.mark.parametrize(("speed", "is_short"), [(0.1, True), (0.25, False), (0.9, False)])
def test_a_budget_below_the_smallest_row_runs_that_row_and_says_so(plan, speed, is_short):
    fleet = Fleet(size=1, speed=Constant(speed))
    table = timetable(fleet, plan(Rows((0.25, 0.5, 1.0))), tasks(np.array([0]), 4, 10.0))
    begun = np.isfinite(table.start)
    assert (table.row[begun] >= 0).all()
    assert (table.is_short[begun] == is_short).all()
    if is_short:
        assert (table.row[begun] == 0).all()


def test_the_ledger_counts_the_mini_batches_whose_budget_was_too_small(tmp_path):
    from pliant.engine.rules import Rules
    from pliant.engine.simulate import Setting

    setting = Setting(rounds=1, per_round=2, rules=Rules(late="partial"))
    fleet = Fleet(size=12, speed=Constant(0.2))
    run(Distreal(local=Local(batch=8)), fleet=fleet, setting=setting, folder=tmp_path)
    first = events(tmp_path)[0]
    assert first.short == len(first.rows) > 0
    assert set(first.rows) == {0}
