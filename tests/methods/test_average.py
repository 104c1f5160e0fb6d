"""Weighted means are exact in their weights and do not depend on order."""

from dataclasses import dataclass
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pliant.methods.average import add_mean, move, relative
from pliant.params import Params

WEIGHTS = st.lists(st.integers(1, 10**6), min_size=1, max_size=8)


@dataclass(frozen=True)
class Changed:
    device: int
    change: Params


def changes(count):
    draws = torch.Generator().manual_seed(count)
    return [Changed(d, {"w": torch.randn(50, generator=draws).double()}) for d in range(count)]


@given(WEIGHTS, st.floats(1e-6, 1e6))
def test_equal_ratios_give_equal_bits(weights, unit):
    exact = [float(weight) for weight in weights]
    assert relative(weights) == relative(exact) == relative([Fraction(w, 7) for w in weights])
    assert max(relative([unit * weight for weight in weights])) == 1.0


def test_a_mean_on_paper():
    params = {"w": torch.tensor([1.0, 2.0]), "n": torch.tensor(4)}
    updates = [
        Changed(0, {"w": torch.tensor([1.0, 0.0]), "n": torch.tensor(3)}),
        Changed(1, {"w": torch.tensor([5.0, 4.0]), "n": torch.tensor(2)}),
    ]
    found = add_mean(params, updates, [3.0, 1.0])
    assert found["w"].tolist() == [3.0, 3.0]
    assert found["n"].item() == 7  # 4 + 2.75 is rounded
    assert found["n"].dtype == torch.int64
    assert params["w"].tolist() == [1.0, 2.0]


@given(WEIGHTS, st.randoms())
def test_the_order_does_not_matter(weights, random):
    pairs = list(zip(changes(len(weights)), weights, strict=True))
    wanted = add_mean({"w": torch.ones(50).double()}, changes(len(weights)), weights)
    random.shuffle(pairs)
    updates, mixed = zip(*pairs, strict=True)
    assert torch.equal(add_mean({"w": torch.ones(50).double()}, updates, mixed)["w"], wanted["w"])


def test_nothing_came_back():
    params = {"w": torch.ones(2)}
    assert add_mean(params, [], []) is params


@pytest.mark.parametrize("weights", [[0.0, 0.0], [1.0, -1.0], [float("nan")], [float("inf"), 1.0]])
def test_impossible_weights_are_refused(weights):
    with pytest.raises(ValueError, match="Expected weights >= 0"):
        relative(weights)


def test_a_tiny_weight_beside_a_huge_one_counts_for_nothing():
    assert relative([5e-324, 1e308]) == [0.0, 1.0]


def test_a_step_has_its_rate():
    assert move({"w": torch.tensor(1.0)}, {"w": torch.tensor(4.0)}, lr=0.5)["w"].item() == 3.0
