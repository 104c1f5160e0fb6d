"""Weighted means with exact weights, and the coverage of each coordinate, counted by hand."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pliant.methods.aggregation import (
    CoverageState,
    add_weighted,
    apply_delta,
    apply_scaled_delta,
    average_deltas,
    build_trained_subnet,
    cover_sent,
    cover_step_share,
    cover_trained,
    make_zeros,
    scale_weights,
    track_coverage,
    weight_by,
)
from pliant.methods.base import Update
from pliant.nn.elastic import elastic
from pliant.params import get_params
from pliant.rng import rng_stream

NET = elastic(
    nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 3, 3), nn.Flatten(), nn.Linear(48, 2)
    ),
    torch.zeros(2, 1, 8, 8),
)
PARAMS = get_params(NET.module)


def make_update(device, subnet_steps, *, subnet=None, samples=1, macs=1.0, value=1.0):
    params = PARAMS if subnet is None else NET.take(PARAMS, subnet)
    delta = {name: torch.full_like(tensor, value) for name, tensor in params.items()}
    steps = sum(number for _, number in subnet_steps)
    return Update(
        device, delta, samples, steps, macs, 0.0, subnet, subnet_steps=tuple(subnet_steps)
    )


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 3)), min_size=1, max_size=4))
def test_the_share_of_steps_is_counted_for_every_coordinate(draws):
    subnet_steps = [(NET.draw(0.5, rng_stream(0, number)), steps) for number, steps in draws]
    counts = {
        name: torch.zeros(tensor.shape, dtype=torch.float64) for name, tensor in PARAMS.items()
    }
    for subnet, steps in subnet_steps:
        for name, ones in NET.embed(PARAMS, NET.take(PARAMS, subnet), subnet)[1].items():
            counts[name] += steps * ones
    total = sum(steps for _, steps in subnet_steps)
    update = make_update(0, subnet_steps)
    shares, trained = cover_step_share(NET, PARAMS, update), cover_trained(NET, PARAMS, update)
    for name in PARAMS:
        assert torch.equal(shares[name], counts[name] / total), name
        assert torch.equal(trained[name], (counts[name] > 0).double()), name


def test_coordinates_that_were_sent_are_covered():
    subnet = NET.select_prefix(0.5)
    cover = cover_sent(NET, PARAMS, make_update(0, [(subnet, 1)], subnet=subnet))
    assert cover["0.weight"].flatten(1)[:, 0].tolist() == [1, 1, 0, 0]
    assert cover["1.running_mean"].tolist() == [1, 1, 0, 0]
    assert cover["1.num_batches_tracked"].item() == 1
    full_cover = cover_sent(NET, PARAMS, make_update(0, [(NET.full, 1)]))
    assert all((tensor == 1).all() for tensor in full_cover.values())


def test_a_coordinate_that_no_device_holds_stays_as_it_is():
    subnet = NET.select_prefix(0.5)
    update = make_update(0, [(subnet, 1)], subnet=subnet, value=3.0)
    delta = average_deltas(NET, PARAMS, [update], weight_by("equal"), cover_sent)
    assert delta["0.bias"].tolist() == [3.0, 3.0, 0.0, 0.0]


def test_a_delta_without_coverage_is_left_out():
    def cover_none(net, params, update):
        return {name: 0.0 * tensor for name, tensor in params.items()}

    delta = average_deltas(NET, PARAMS, [make_update(0, [])], weight_by("equal"), cover_none)
    assert all(not tensor.any() for tensor in delta.values())


def test_weights_are_by_samples_macs_or_equal():
    updates = [
        make_update(0, [], samples=3, macs=1.0, value=4.0),
        make_update(1, [], macs=7.0, value=0.0),
    ]
    means = {
        weighting: average_deltas(NET, PARAMS, updates, weight_by(weighting))["0.bias"][0].item()
        for weighting in ("samples", "macs", "equal")
    }
    assert means == {"samples": 3.0, "macs": 0.5, "equal": 2.0}


def test_only_trained_tensors_use_the_servers_learning_rate():
    delta = {name: torch.ones_like(tensor, dtype=torch.float64) for name, tensor in PARAMS.items()}
    params = apply_scaled_delta(NET, PARAMS, delta, 0.5)
    assert torch.equal(params["0.bias"], PARAMS["0.bias"] + 0.5)
    assert torch.equal(params["1.running_var"], PARAMS["1.running_var"] + 1)
    assert params["1.num_batches_tracked"].item() == 1


def test_trained_filters_are_remembered():
    state = CoverageState(PARAMS)
    assert build_trained_subnet(NET, state) is None  # nothing is known yet
    state = track_coverage(state, [make_update(0, [(NET.select_prefix(0.5), 2)])])
    assert build_trained_subnet(NET, state).counts == (2, 2)
    second_half = NET.select_prefix(0.5, NET.make_rolling_orders(2))
    state = track_coverage(state, [make_update(0, [(second_half, 1)])])
    assert build_trained_subnet(NET, state) is None


WEIGHTS = st.lists(st.integers(1, 10**6), min_size=1, max_size=8)


@given(WEIGHTS, st.floats(1e-6, 1e6))
def test_equal_ratios_give_equal_bits(weights, unit):
    exact = [float(weight) for weight in weights]
    assert (
        scale_weights(weights)
        == scale_weights(exact)
        == scale_weights([Fraction(w, 7) for w in weights])
    )
    assert max(scale_weights([unit * weight for weight in weights])) == 1.0


def test_a_running_sum_by_hand():
    params = {"w": torch.tensor([1.0, 2.0]), "n": torch.tensor(4)}
    total = make_zeros(params)
    add_weighted(total, {"w": torch.tensor([1.0, 0.0]), "n": torch.tensor(3)}, 0.75)
    add_weighted(total, {"w": torch.tensor([5.0, 4.0]), "n": torch.tensor(2)}, 0.25)
    updated = apply_delta(params, total)
    assert updated["w"].tolist() == [3.0, 3.0]
    assert updated["n"].item() == 7  # 4 + 2.75 is rounded
    assert updated["n"].dtype == torch.int64
    assert params["w"].tolist() == [1.0, 2.0]


@pytest.mark.parametrize("weights", [[0.0, 0.0], [1.0, -1.0], [float("nan")], [float("inf"), 1.0]])
def test_impossible_weights_are_rejected(weights):
    with pytest.raises(ValueError, match="Expected weights >= 0"):
        scale_weights(weights)


def test_a_tiny_weight_beside_a_huge_one_counts_for_nothing():
    assert scale_weights([5e-324, 1e308]) == [0.0, 1.0]


def test_a_delta_is_scaled_by_the_learning_rate():
    params, delta = {"w": torch.tensor(1.0)}, {"w": torch.tensor(4.0)}
    assert apply_delta(params, delta, lr=0.5)["w"].item() == 3.0
