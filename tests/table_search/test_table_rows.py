import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.table_search.table_rows import TableRows, fill_gaps, select_monotone


def cost(vectors):
    return ((1 - vectors) ** 2).mean(axis=1)


def make_columns(*rows):
    return [np.array(column) for column in zip(*rows, strict=True)]


def test_a_row_that_costs_more_and_gains_less_is_left_out():
    measured = ([0.5], 0.25, 0.1), ([0.3], 0.49, 0.3), ([0.2], 0.64, 0.2), ([0], 1, 0.4)
    rows = select_monotone(*make_columns(*measured))
    assert rows.costs.tolist() == [0.25, 0.49, 1.0]
    assert rows.gains.tolist() == [0.1, 0.3, 0.4]


def test_the_full_network_stays_even_where_a_cheaper_vector_scores_better():
    columns = make_columns(([0.5], 0.25, 0.1), ([0.3], 0.49, 0.5), ([0.0], 1.0, 0.4))
    rows = select_monotone(*columns)
    assert rows.vectors.tolist() == [[0.5], [0.3], [0.0]]
    assert rows.gains.tolist() == [0.1, 0.5, 0.5]


def test_the_widest_gap_is_filled_at_half_of_its_cost():
    ends = TableRows(*make_columns(([0.5, 0.5], 0.25, 0.0), ([0.0, 0.0], 1.0, 1.0)))
    rows = fill_gaps(ends, 3, cost)
    assert rows.costs.tolist() == pytest.approx([0.25, 0.625, 1.0], abs=1e-6)
    assert rows.gains.tolist() == pytest.approx([0.0, 0.5, 1.0], abs=1e-6)
    assert cost(rows.vectors) == pytest.approx(rows.costs)
    assert rows.vectors[1, 0] == np.float32(rows.vectors[1, 0])  # as in a table file


def test_a_gap_stays_where_the_line_between_two_vectors_leaves_it():
    def bump(vectors):  # dearer in the middle than at both ends
        return 1 - np.abs(vectors[:, 0] - 0.25)

    ends = TableRows(*make_columns(([0.0], 0.75, 0.1), ([0.4], 0.85, 0.2)))
    rows = fill_gaps(ends, 8, lambda vectors: np.where(vectors[:, 0] < 0.4, 2.0, 0.85))
    assert len(rows.costs) == 2
    assert len(fill_gaps(ends, 3, bump).costs) == 3


def test_a_gap_between_two_image_sides_stays():
    def step_cost(vectors):
        return 0.3 - 0.4 * vectors[:, 0] + 1.4 * (0.5 - vectors[:, 1])

    measured = ([0.5, 0.5], 0.1, 0.0), ([0.0, 0.5], 0.3, 0.2), ([0.0, 0.0], 1.0, 1.0)
    rows = fill_gaps(TableRows(*make_columns(*measured)), 5, step_cost, levels=1)
    assert rows.vectors[:, 1].tolist() == [0.5, 0.5, 0.5, 0.5, 0.0]
    assert rows.costs.tolist() == pytest.approx([0.1, 0.15, 0.2, 0.3, 1.0])


RATE = st.floats(0.0, 0.5)


@given(st.lists(st.tuples(RATE, RATE, st.floats(0, 1)), min_size=1, max_size=12))
def test_rows_rise_in_cost_and_gain_for_any_measurements(measured):
    vectors = np.array([row[:2] for row in measured] + [(0.0, 0.0)])
    gains = np.array([row[2] for row in measured] + [0.5])
    rows = fill_gaps(select_monotone(vectors, cost(vectors), gains), 16, cost)
    assert (np.diff(rows.costs) >= 0).all()
    assert (np.diff(rows.gains) >= 0).all()
    assert rows.vectors[-1].tolist() == [0.0, 0.0]
