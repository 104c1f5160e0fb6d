"""What each coordinate counts, against counting by hand."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pliant.methods.base import State, Update
from pliant.methods.merge import (
    FILTERS,
    held,
    mean_change,
    move_trained,
    seen_filters,
    stepped,
    touched,
    weight_by,
    widest_of,
)
from pliant.nn.elastic import elastic
from pliant.params import params_of
from pliant.rng import stream

NET = elastic(
    nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 3, 3), nn.Flatten(), nn.Linear(48, 2)
    ),
    torch.zeros(2, 1, 8, 8),
)
PARAMS = params_of(NET.net)


def update(device, trained, *, subnet=None, samples=1, macs=1.0, value=1.0):
    shapes = PARAMS if subnet is None else NET.take(PARAMS, subnet)
    change = {name: torch.full_like(tensor, value) for name, tensor in shapes.items()}
    steps = sum(number for _, number in trained)
    return Update(device, change, samples, steps, macs, 0.0, subnet, trained=tuple(trained))


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 3)), min_size=1, max_size=4))
def test_the_share_of_steps_is_counted_for_every_coordinate(drawn):
    trained = [(NET.draw(0.5, stream(0, number)), steps) for number, steps in drawn]
    wanted = {
        name: torch.zeros(tensor.shape, dtype=torch.float64) for name, tensor in PARAMS.items()
    }
    for subnet, steps in trained:
        for name, ones in NET.embed(PARAMS, NET.take(PARAMS, subnet), subnet)[1].items():
            wanted[name] += steps * ones
    total = sum(steps for _, steps in trained)
    one = update(0, trained)
    found, any_step = stepped(NET, PARAMS, one), touched(NET, PARAMS, one)
    for name in PARAMS:
        assert torch.equal(found[name], wanted[name] / total), name
        assert torch.equal(any_step[name], (wanted[name] > 0).double()), name


def test_what_was_sent_is_held():
    subnet = NET.first(0.5)
    found = held(NET, PARAMS, update(0, [(subnet, 1)], subnet=subnet))
    assert found["0.weight"].flatten(1)[:, 0].tolist() == [1, 1, 0, 0]
    assert found["1.running_mean"].tolist() == [1, 1, 0, 0]
    assert found["1.num_batches_tracked"].item() == 1
    whole = held(NET, PARAMS, update(0, [(NET.full, 1)]))
    assert all((tensor == 1).all() for tensor in whole.values())


def test_nobody_s_coordinate_stays_as_it_is():
    subnet = NET.first(0.5)
    part = update(0, [(subnet, 1)], subnet=subnet, value=3.0)
    change = mean_change(NET, PARAMS, [part], weight_by("equal"), held)
    assert change["0.bias"].tolist() == [3.0, 3.0, 0.0, 0.0]


def test_a_change_that_does_not_count_is_left_out():
    def none(net, params, update):
        return {name: 0.0 * tensor for name, tensor in params.items()}

    change = mean_change(NET, PARAMS, [update(0, [])], weight_by("equal"), none)
    assert all(not tensor.any() for tensor in change.values())


def test_weights_are_by_samples_macs_or_equal():
    updates = [update(0, [], samples=3, macs=1.0, value=4.0), update(1, [], macs=7.0, value=0.0)]
    found = {
        weigh: mean_change(NET, PARAMS, updates, weight_by(weigh))["0.bias"][0].item()
        for weigh in ("samples", "macs", "equal")
    }
    assert found == {"samples": 3.0, "macs": 0.5, "equal": 2.0}


def test_only_what_is_trained_moves_at_the_servers_rate():
    change = {name: torch.ones_like(tensor, dtype=torch.float64) for name, tensor in PARAMS.items()}
    found = move_trained(NET, PARAMS, change, 0.5)
    assert torch.equal(found["0.bias"], PARAMS["0.bias"] + 0.5)
    assert torch.equal(found["1.running_var"], PARAMS["1.running_var"] + 1)
    assert found["1.num_batches_tracked"].item() == 1


def test_filters_that_were_trained_are_remembered():
    state = State(PARAMS)
    assert widest_of(NET, state) is None  # nothing was trained, so nothing is known
    one = seen_filters(state, [update(0, [(NET.first(0.5), 2)])])
    state = State(PARAMS, {FILTERS: one})
    assert widest_of(NET, state).counts == (2, 2)
    both = seen_filters(state, [update(0, [(NET.first(0.5, NET.rolled(2)), 1)])])
    assert widest_of(NET, State(PARAMS, {FILTERS: both})) is None
