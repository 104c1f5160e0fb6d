import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.score import c3

shares = st.floats(0, 1)


# as computed from the authors' figures in the specification, budgets 84.64 GB and 17.13 TFLOPs
@pytest.mark.parametrize(
    ("accuracy", "sent", "macs", "score"),
    [(0.8465, 84.64, 3.76, 0.727), (0.8421, 2.39, 17.13, 0.741), (0.8888, 9.71, 5.38, 0.842)],
)
def test_figures_of_mixed_noniid(accuracy, sent, macs, score):
    found = c3(accuracy, sent, macs, most_sent=84.64, most_macs=17.13)
    assert found == pytest.approx(score, abs=5e-4)


@given(shares, shares, shares)
def test_the_score_lies_between_the_accuracy_at_both_budgets_and_the_accuracy(a, b, c):
    found = c3(a, b, c, most_sent=1, most_macs=1)
    assert a * math.exp(-2 / 8) - 1e-12 <= found <= a


def test_a_low_temperature_punishes_costs_more():
    hot, cold = (c3(0.9, 1, 1, most_sent=2, most_macs=2, temperature=t) for t in (8, 1))
    assert cold < hot


def test_a_run_that_sends_nothing_needs_no_budget():
    assert c3(0.5, 0, 1, most_sent=0, most_macs=1) == pytest.approx(0.5 * math.exp(-1 / 8))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"temperature": 0.0}, "temperature above 0, got 0.0"),
        ({"most_sent": 0.0}, "budget above 0 for a cost of 1.0"),
        ({"most_macs": -1.0}, "at least 0"),
    ],
)
def test_what_makes_no_sense_is_refused(options, told):
    with pytest.raises(ValueError, match=told):
        c3(0.5, 1.0, 1.0, **({"most_sent": 1.0, "most_macs": 1.0} | options))
