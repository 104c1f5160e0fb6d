import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.explore.rows import Rows, filled, monotone


def cost(vectors):
    return ((1 - vectors) ** 2).mean(axis=1)


def rows(*given_rows):
    vectors, costs, gains = zip(*given_rows, strict=True)
    return np.array(vectors), np.array(costs), np.array(gains)


def test_a_row_that_costs_more_and_gains_less_is_left_out():
    made = monotone(
        *rows(([0.5], 0.25, 0.1), ([0.3], 0.49, 0.3), ([0.2], 0.64, 0.2), ([0], 1, 0.4))
    )
    assert made.costs.tolist() == [0.25, 0.49, 1.0]
    assert made.gains.tolist() == [0.1, 0.3, 0.4]


def test_the_full_network_stays_even_where_a_cheaper_vector_came_out_better():
    made = monotone(*rows(([0.5], 0.25, 0.1), ([0.3], 0.49, 0.5), ([0.0], 1.0, 0.4)))
    assert made.vectors.tolist() == [[0.5], [0.3], [0.0]]
    assert made.gains.tolist() == [0.1, 0.5, 0.5]


def test_the_widest_gap_is_filled_at_half_of_its_cost():
    given_rows = Rows(*rows(([0.5, 0.5], 0.25, 0.0), ([0.0, 0.0], 1.0, 1.0)))
    made = filled(given_rows, 3, cost)
    assert made.costs.tolist() == pytest.approx([0.25, 0.625, 1.0], abs=1e-6)
    assert made.gains.tolist() == pytest.approx([0.0, 0.5, 1.0], abs=1e-6)
    assert cost(made.vectors) == pytest.approx(made.costs)
    assert made.vectors[1, 0] == np.float32(made.vectors[1, 0])  # what a file holds


def test_a_gap_stays_where_the_line_between_two_vectors_leaves_it():
    def bump(vectors):  # dearer in the middle than at both ends
        return 1 - np.abs(vectors[:, 0] - 0.25)

    given_rows = Rows(*rows(([0.0], 0.75, 0.1), ([0.4], 0.85, 0.2)))
    made = filled(given_rows, 8, lambda vectors: np.where(vectors[:, 0] < 0.4, 2.0, 0.85))
    assert len(made.costs) == 2
    assert len(filled(given_rows, 3, bump).costs) == 3


@given(
    st.lists(
        st.tuples(st.floats(0.0, 0.5), st.floats(0.0, 0.5), st.floats(0, 1)),
        min_size=1,
        max_size=12,
    )
)
def test_rows_rise_in_cost_and_gain_whatever_was_measured(measured):
    vectors = np.array([row[:2] for row in measured] + [(0.0, 0.0)])
    gains = np.array([row[2] for row in measured] + [0.5])
    made = filled(monotone(vectors, cost(vectors), gains), 16, cost)
    assert (np.diff(made.costs) >= 0).all()
    assert (np.diff(made.gains) >= 0).all()
    assert made.vectors[-1].tolist() == [0.0, 0.0]
