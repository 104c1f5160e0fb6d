import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.c3 import c3_score

unit = st.floats(0, 1)


# computed from the authors' figures, with budgets of 84.64 GB and 17.13 TFLOPs
@pytest.mark.parametrize(
    ("accuracy", "traffic", "macs", "expected"),
    [(0.8465, 84.64, 3.76, 0.727), (0.8421, 2.39, 17.13, 0.741), (0.8888, 9.71, 5.38, 0.842)],
)
def test_scores_match_the_figures_of_mixed_noniid(accuracy, traffic, macs, expected):
    score = c3_score(accuracy, traffic, macs, max_traffic=84.64, max_macs=17.13)
    assert score == pytest.approx(expected, abs=5e-4)


@given(unit, unit, unit)
def test_the_score_lies_between_that_of_full_budgets_and_the_accuracy(accuracy, traffic, macs):
    score = c3_score(accuracy, traffic, macs, max_traffic=1, max_macs=1)
    assert accuracy * math.exp(-2 / 8) - 1e-12 <= score <= accuracy


def test_a_low_temperature_punishes_costs_more():
    hot, cold = (c3_score(0.9, 1, 1, max_traffic=2, max_macs=2, temperature=t) for t in (8, 1))
    assert cold < hot


def test_a_run_that_sends_nothing_needs_no_budget():
    assert c3_score(0.5, 0, 1, max_traffic=0, max_macs=1) == pytest.approx(0.5 * math.exp(-1 / 8))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0}, "temperature above 0, got 0.0"),
        ({"max_traffic": 0.0}, "budget above 0 for a cost of 1.0"),
        ({"max_macs": -1.0}, "at least 0"),
    ],
)
def test_invalid_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        c3_score(0.5, 1.0, 1.0, **({"max_traffic": 1.0, "max_macs": 1.0} | options))
