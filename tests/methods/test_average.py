"""Weighted means are exact in their weights."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pliant.methods.average import accumulate, move, nothing, relative

WEIGHTS = st.lists(st.integers(1, 10**6), min_size=1, max_size=8)


@given(WEIGHTS, st.floats(1e-6, 1e6))
def test_equal_ratios_give_equal_bits(weights, unit):
    exact = [float(weight) for weight in weights]
    assert relative(weights) == relative(exact) == relative([Fraction(w, 7) for w in weights])
    assert max(relative([unit * weight for weight in weights])) == 1.0


def test_a_running_sum_on_paper():
    params = {"w": torch.tensor([1.0, 2.0]), "n": torch.tensor(4)}
    total = nothing(params)
    accumulate(total, {"w": torch.tensor([1.0, 0.0]), "n": torch.tensor(3)}, 0.75)
    accumulate(total, {"w": torch.tensor([5.0, 4.0]), "n": torch.tensor(2)}, 0.25)
    found = move(params, total)
    assert found["w"].tolist() == [3.0, 3.0]
    assert found["n"].item() == 7  # 4 + 2.75 is rounded
    assert found["n"].dtype == torch.int64
    assert params["w"].tolist() == [1.0, 2.0]


@pytest.mark.parametrize("weights", [[0.0, 0.0], [1.0, -1.0], [float("nan")], [float("inf"), 1.0]])
def test_impossible_weights_are_refused(weights):
    with pytest.raises(ValueError, match="Expected weights >= 0"):
        relative(weights)


def test_a_tiny_weight_beside_a_huge_one_counts_for_nothing():
    assert relative([5e-324, 1e308]) == [0.0, 1.0]


def test_a_step_has_its_rate():
    assert move({"w": torch.tensor(1.0)}, {"w": torch.tensor(4.0)}, lr=0.5)["w"].item() == 3.0
