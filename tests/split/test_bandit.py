import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.rng import stream
from pliant.split.bandit import Bandit, best


def by_definition(losses, bits, gamma):
    """Score a whole history as the authors' formula has it."""
    rows = len(losses)
    weights = gamma ** np.arange(rows - 1, -1, -1)
    loss = weights @ np.array(losses)
    count = weights @ np.array(bits) + 1e-15
    return loss / count + np.sqrt(2 * math.log(rows) / count)


def test_five_steps_by_hand():
    bandit = Bandit(2, discount=0.5)
    losses, bits = [[100.0, 100.0]], [[0, 0]]
    steps = [{0: 4.0}, {1: 2.0}, {0: 3.0}, {0: 1.0, 1: 1.0}, {1: 5.0}]
    rows = [
        [4.0, 100.0],  # the second client's is the mean of 100 and 100
        [52.0, 2.0],  # the first's: (4 + 100) / 2
        [3.0, 51.0],
        [1.0, 1.0],
        [2.0, 5.0],
    ]
    for step, row in zip(steps, rows, strict=True):
        bandit.learn(step)
        losses.append(row)
        bits.append([int(client in step) for client in range(2)])
        assert bandit.last[0].tolist() == row
    assert bandit.scores() == pytest.approx(by_definition(losses, bits, 0.5), rel=1e-12)
    # by hand, the first client: losses 2 + 1/2 + 3/4 + 52/8 + 4/16 + 100/32, selected 0 + 1/2 +
    # 1/4 + 0 + 1/16
    assert bandit.losses[0] == 2 + 0.5 + 0.75 + 6.5 + 0.25 + 3.125
    assert bandit.chosen[0] == 0.8125


# AdaSplit: five clients, three at a time; shares of steps in which each was selected
@pytest.mark.parametrize(
    ("losses", "gamma", "shares"),
    [
        ((1.0,) * 5, 0.75, (0.60,) * 5),
        ((0.1, 0.3, 0.5, 1.0, 2.0), 0.75, (0.35, 0.46, 0.51, 0.69, 0.99)),
        ((0.1, 0.3, 0.5, 1.0, 2.0), 0.87, (0.31, 0.42, 0.52, 0.75, 0.99)),
        ((0.5, 0.5, 0.5, 0.5, 5.0), 0.75, (0.50, 0.50, 0.50, 0.50, 1.0)),
    ],
)
def test_selection_shares_are_those_of_the_specification(losses, gamma, shares):
    bandit, counts, steps = Bandit(5, gamma), np.zeros(5), 1000
    for step in range(steps):
        chosen = best(bandit.scores(), range(5), 3, stream(0, "test", step))
        counts[chosen] += 1
        bandit.learn({client: losses[client] for client in chosen})
    # those were found by another simulation, whose length and noise are not known
    assert counts / steps == pytest.approx(shares, abs=0.035)


@given(st.lists(st.sets(st.integers(0, 3)), max_size=8))
def test_a_bandit_that_was_saved_goes_on_as_it_was(steps):
    one, two = Bandit(4, 0.75), Bandit(4, 0.75)
    for chosen in steps:
        one.learn({client: 1.0 + client for client in chosen})
    two.restore(one.state())
    for bandit in (one, two):
        bandit.learn({0: 0.5})
    assert one.scores().tolist() == two.scores().tolist()


def test_only_those_who_are_there_are_chosen():
    assert best([9.0, 1.0, 5.0], [1, 2], 1, stream(0, "x")) == [2]
    assert best([9.0, 1.0, 5.0], [1, 2], 5, stream(0, "x")) == [1, 2]
    assert best([9.0, 1.0, 5.0], [], 2, stream(0, "x")) == []


def test_ties_are_broken_at_random():
    firsts = {best([1.0] * 4, range(4), 1, stream(0, "tie", n))[0] for n in range(60)}
    assert firsts == {0, 1, 2, 3}
