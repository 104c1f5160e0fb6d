import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.explore.front import front, hypervolume, served

POINTS = st.lists(
    st.tuples(st.floats(-0.25, 1.25, width=32), st.floats(-0.25, 1.25, width=32)),
    min_size=1,
    max_size=30,
)


def columns(points):
    given_points = np.array(points, np.float64).reshape(-1, 2)
    return given_points[:, 0], given_points[:, 1]


def test_a_point_that_costs_more_and_loses_more_is_not_on_the_front():
    costs, losses = columns([(0.0, 1.0), (0.5, 0.5), (0.6, 0.6), (1.0, 0.0)])
    assert front(costs, losses).tolist() == [0, 1, 3]


@given(POINTS)
def test_no_point_of_a_front_dominates_another_and_all_others_are_dominated(points):
    costs, losses = columns(points)
    chosen = front(costs, losses)
    assert (np.diff(costs[chosen]) > 0).all()
    assert (np.diff(losses[chosen]) < 0).all()
    for cost, loss in points:
        assert ((costs[chosen] <= cost) & (losses[chosen] <= loss)).any()


@given(POINTS)
def test_the_hypervolume_is_pymoos(points):
    indicator = pytest.importorskip("pymoo.indicators.hv").HV(ref_point=np.array([1.0, 1.0]))
    costs, losses = columns(points)
    assert hypervolume(costs, losses) == pytest.approx(indicator(np.array(points)), abs=1e-9)


def test_what_is_served_is_the_hypervolume_of_a_monotone_table():
    costs, losses = columns([(0.0, 0.9), (0.25, 0.5), (0.5, 0.25), (1.0, 0.0)])
    assert served(costs, losses) == pytest.approx(hypervolume(costs, losses))


def test_what_is_served_suffers_where_a_dearer_row_is_worse():
    costs, losses = columns([(0.0, 0.2), (0.5, 0.6)])
    assert served(costs, losses) == pytest.approx(0.5 * 0.8 + 0.5 * 0.4)
    assert hypervolume(costs, losses) == pytest.approx(0.8)
