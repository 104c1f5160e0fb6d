import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.rng import rng_stream
from pliant.split.bandit import Bandit, select_top_clients


def compute_scores_by_definition(losses, selections, gamma):
    """Score a complete history by the authors' formula."""
    rows = len(losses)
    weights = gamma ** np.arange(rows - 1, -1, -1)
    loss = weights @ np.array(losses)
    count = weights @ np.array(selections) + 1e-15
    return loss / count + np.sqrt(2 * math.log(rows) / count)


def test_five_steps_by_hand():
    bandit = Bandit(2, discount=0.5)
    losses, selections = [[100.0, 100.0]], [[0, 0]]
    steps = [{0: 4.0}, {1: 2.0}, {0: 3.0}, {0: 1.0, 1: 1.0}, {1: 5.0}]
    rows = [
        [4.0, 100.0],  # the second client's is the mean of 100 and 100
        [52.0, 2.0],  # the first's: (4 + 100) / 2
        [3.0, 51.0],
        [1.0, 1.0],
        [2.0, 5.0],
    ]
    for step, row in zip(steps, rows, strict=True):
        bandit.update(step)
        losses.append(row)
        selections.append([int(client in step) for client in range(2)])
        assert bandit.last_losses[0].tolist() == row
    expected = compute_scores_by_definition(losses, selections, 0.5)
    assert bandit.compute_scores() == pytest.approx(expected, rel=1e-12)
    # the first client by hand: losses 2 + 1/2 + 3/4 + 52/8 + 4/16 + 100/32,
    # selections 0 + 1/2 + 1/4 + 0 + 1/16
    assert bandit.losses[0] == 2 + 0.5 + 0.75 + 6.5 + 0.25 + 3.125
    assert bandit.selections[0] == 0.8125


# AdaSplit: five clients, three selected per step; the share of steps in which each was selected
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
        selected = select_top_clients(
            bandit.compute_scores(), range(5), 3, rng_stream(0, "test", step)
        )
        counts[selected] += 1
        bandit.update({client: losses[client] for client in selected})
    # the shares are from another simulation, whose length and noise are unknown
    assert counts / steps == pytest.approx(shares, abs=0.035)


@given(st.lists(st.sets(st.integers(0, 3)), max_size=8))
def test_a_restored_bandit_continues_with_the_same_scores(steps):
    original, restored = Bandit(4, 0.75), Bandit(4, 0.75)
    for selected in steps:
        original.update({client: 1.0 + client for client in selected})
    restored.load_state_dict(original.state_dict())
    for bandit in (original, restored):
        bandit.update({0: 0.5})
    assert original.compute_scores().tolist() == restored.compute_scores().tolist()


def test_only_candidates_are_selected():
    scores = np.array([9.0, 1.0, 5.0])
    assert select_top_clients(scores, [1, 2], 1, rng_stream(0, "x")) == [2]
    assert select_top_clients(scores, [1, 2], 5, rng_stream(0, "x")) == [1, 2]
    assert select_top_clients(scores, [], 2, rng_stream(0, "x")) == []


def test_ties_are_broken_at_random():
    firsts = {
        select_top_clients(np.ones(4), range(4), 1, rng_stream(0, "tie", n))[0] for n in range(60)
    }
    assert firsts == {0, 1, 2, 3}
