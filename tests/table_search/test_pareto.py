import numpy as np
import pytest
from benchmarks.search import average_over_budgets
from hypothesis import given
from hypothesis import strategies as st

from pliant.table_search.pareto import find_pareto_front, find_undominated, hypervolume

COORDINATE = st.floats(-0.25, 1.25, width=32)
POINTS = st.lists(st.tuples(COORDINATE, COORDINATE), min_size=1, max_size=30)


def columns(points):
    return tuple(np.array(points, np.float64).reshape(-1, 2).T)


def test_a_point_that_costs_more_and_loses_more_is_not_on_the_front():
    costs, losses = columns([(0.0, 1.0), (0.5, 0.5), (0.6, 0.6), (1.0, 0.0)])
    assert find_pareto_front(costs, losses).tolist() == [0, 1, 3]


@given(POINTS)
def test_no_point_of_a_front_dominates_another_and_all_others_are_dominated(points):
    costs, losses = columns(points)
    front = find_pareto_front(costs, losses)
    assert (np.diff(costs[front]) > 0).all()
    assert (np.diff(losses[front]) < 0).all()
    for cost, loss in points:
        assert ((costs[front] <= cost) & (losses[front] <= loss)).any()


@given(POINTS)
def test_the_hypervolume_is_pymoos(points):
    indicator = pytest.importorskip("pymoo.indicators.hv").HV(ref_point=np.array([1.0, 1.0]))
    costs, losses = columns(points)
    assert hypervolume(costs, losses) == pytest.approx(indicator(np.array(points)), abs=1e-9)


def test_the_average_over_budgets_is_the_hypervolume_of_a_monotone_table():
    costs, losses = columns([(0.0, 0.9), (0.25, 0.5), (0.5, 0.25), (1.0, 0.0)])
    assert average_over_budgets(costs, losses) == pytest.approx(hypervolume(costs, losses))


def test_the_average_over_budgets_falls_where_a_dearer_row_is_worse():
    costs, losses = columns([(0.0, 0.2), (0.5, 0.6)])
    assert average_over_budgets(costs, losses) == pytest.approx(0.5 * 0.8 + 0.5 * 0.4)
    assert hypervolume(costs, losses) == pytest.approx(0.8)


@given(st.lists(st.tuples(*[st.integers(0, 3)] * 3), min_size=1, max_size=12))
def test_the_undominated_points_are_those_of_pymoo(rows):
    sorting = pytest.importorskip("pymoo.util.nds.non_dominated_sorting")
    costs = np.array(rows, float)
    expected = sorted(sorting.find_non_dominated(costs))
    assert np.flatnonzero(find_undominated(costs)).tolist() == expected
