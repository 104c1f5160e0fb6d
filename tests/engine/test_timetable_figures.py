"""Known effects of changing resources on methods, which the timetable alone must reproduce.

Speeds are uniform on [0.25, 1] and redrawn lambda times per round; the full network at speed 1
just fills the round. The figures are from independent simulations, accurate to two points.
"""

import numpy as np
import pytest

from pliant.devices import FULL_NETWORK, ChangingTrace, CostRows, Fleet, PerBatch, PerRound
from pliant.engine.round_rules import RoundRules, TaskOutcome
from pliant.engine.round_tasks import make_tasks
from pliant.engine.timetable import build_timetable
from pliant.rng import rng_stream

DEVICES = np.arange(8_000)
LAMBDAS = (0.0, 0.5, 1.0, 2.0, 4.0)
POINTS = 0.02

# Federated Dropout solves for its rate
ANY_RATE = CostRows(tuple(np.linspace(0.25, 1.0, 2001).tolist()))
TABLE = CostRows(tuple(np.linspace(0.25, 1.0, 64).tolist()))  # DISTREAL's table has 64 rows
LEVELS = CostRows((0.146, 0.252, 0.527, 1.0))  # HeteroFL on DenseNet-40: widths 0.7³ … 0.7⁰
WIDTHS = CostRows(tuple(width**2 for width in np.linspace(0.5, 1.0, 11).tolist()))

DISCARD, PARTIAL = RoundRules(grace=0.0), RoundRules(late="partial", grace=0.0)
GRACE = RoundRules(grace=0.03)
NOISE = {
    step: 0.07 * rng_stream(0, "noise", step).standard_normal(len(DEVICES)) for step in range(16)
}


def noisy(devices, step, choice):
    return choice.macs * (1 + NOISE[step][devices])


def compute_shares(policy, rules=DISCARD, *, batches=16, step_cost=None):
    """Return the shares of devices that finish and of MACs that are useful, for each lambda."""
    finished, useful = [], []
    for per_round in LAMBDAS:
        speed = ChangingTrace(low=0.25, high=1.0, per_round=per_round)
        fleet, tasks = Fleet(size=len(DEVICES), speed=speed), make_tasks(DEVICES, batches, 1e6)
        options = {"seed": 1, "start": 50.0, "step_cost": step_cost}
        table = build_timetable(fleet, policy, tasks, rules, **options)
        finished.append((table.outcomes == TaskOutcome.FINISHED).mean())
        useful.append(table.useful.sum() / table.available.sum())
    return finished, useful


@pytest.mark.parametrize(
    ("policy", "expected_finished", "expected_useful"),
    [
        (PerRound(ANY_RATE), [1, 0.80, 0.68, 0.57, 0.51], [1, 0.76, 0.62, 0.47, 0.38]),
        (PerRound(ANY_RATE, 0.8), [1, 0.93, 0.89, 0.83, 0.78], [0.80, 0.73, 0.68, 0.62, 0.56]),
        (PerRound(ANY_RATE, 0.7), [1, 0.96, 0.94, 0.91, 0.89], [0.70, 0.67, 0.64, 0.61, 0.59]),
        (PerRound(LEVELS), [1, 0.96, 0.94, 0.91, 0.90], [0.68, 0.65, 0.63, 0.61, 0.60]),
        (PerRound(WIDTHS), [1, 0.86, 0.77, 0.66, 0.59], [0.94, 0.77, 0.66, 0.53, 0.44]),
    ],
    ids=["federated dropout", "planning 80 %", "planning 70 %", "heterofl", "heterofl, fine"],
)
def test_methods_that_choose_at_the_start_of_the_round(policy, expected_finished, expected_useful):
    finished, useful = compute_shares(policy, batches=4)  # their result does not depend on this
    assert finished == pytest.approx(expected_finished, abs=POINTS)
    assert useful == pytest.approx(expected_useful, abs=POINTS)


AS_WRITTEN, PACED = PerBatch(TABLE), PerBatch(TABLE, "paced")


@pytest.mark.parametrize(
    ("policy", "rules", "batches", "step_cost", "expected"),
    [
        (AS_WRITTEN, DISCARD, 16, None, [1, 0.88, 0.79, 0.66, 0.50]),
        (AS_WRITTEN, DISCARD, 8, None, [1, 0.85, 0.74, 0.60, 0.45]),
        (PACED, DISCARD, 16, None, [1, 0.97, 0.94, 0.90, 0.82]),
        (PACED, DISCARD, 16, noisy, [0.57, 0.58, 0.57, 0.56, 0.53]),
        (PACED, GRACE, 16, noisy, [1, 0.99, 0.98, 0.97, 0.95]),
    ],
    ids=["as written", "as written, 8 mini-batches", "paced", "and 7 % noise", "and 3 % grace"],
)
def test_distreal_with_a_strict_deadline(policy, rules, batches, step_cost, expected):
    finished, _ = compute_shares(policy, rules, batches=batches, step_cost=step_cost)
    assert finished == pytest.approx(expected, abs=POINTS)


@pytest.mark.parametrize(
    ("policy", "batches", "expected"),
    [
        (AS_WRITTEN, 16, [0.99, 0.98, 0.98, 0.97, 0.97]),
        (FULL_NETWORK, 16, [0.95] * 5),
        (FULL_NETWORK, 8, [0.90] * 5),
    ],
    ids=["distreal as written", "full network, 16 mini-batches", "full network, 8"],
)
def test_the_useful_share_when_partial_work_is_sent(policy, batches, expected):
    _, useful = compute_shares(policy, PARTIAL, batches=batches)
    assert useful == pytest.approx(expected, abs=POINTS)
