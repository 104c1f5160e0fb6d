"""Tables of kept sub-networks, and the orders that they are taken from."""

import numpy as np
import torch
from torch import nn

from pliant.methods.base import Place
from pliant.methods.parts import (
    common_order,
    counted_table,
    fine_widths,
    own_order,
    random_order,
    rolled_order,
    taken_first,
    widths_table,
)
from pliant.nn.elastic import elastic

NET = elastic(
    nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 3, 3), nn.Flatten(), nn.Linear(48, 2)),
    torch.zeros(2, 1, 8, 8),
)


def test_a_table_has_the_costs_of_whole_filters():
    table = widths_table(NET, (1.0, 0.5))
    assert table.rates == ((0.5, 0.5), (0.0, 0.0))
    half = NET.macs(NET.first(0.5), training=True) / NET.macs(NET.full, training=True)
    assert table.shares == (half, 1.0)


def test_rows_are_sorted_by_what_they_cost():
    # 3 of 4 and 1 of 3 filters, or 1 of 4 and all of 3
    table = counted_table(NET, ((0.25, 0.7), (0.8, 0.0), (0.0, 0.0)))
    assert list(table.shares) == sorted(table.shares)
    costs = [NET.macs(NET.first(rates), training=True) for rates in table.rates]
    assert costs == sorted(costs)


def test_fine_widths_go_up_to_the_whole_network():
    widths = fine_widths(0.25)
    assert widths[0] == 0.25
    assert widths[-1] == 1.0
    assert widths_table(NET, widths).shares[-1] == 1.0


def test_the_same_place_gives_the_very_same_sub_network():
    place = Place(0, 3, 7)
    one = taken_first(NET, (0.5, 0.5), random_order(NET, place))
    assert taken_first(NET, (0.5, 0.5), random_order(NET, Place(0, 3, 7))) is one
    assert one.counts == (2, 2)
    random_order.cache_clear()
    taken_first.cache_clear()
    again = taken_first(NET, (0.5, 0.5), random_order(NET, place))
    assert all(map(np.array_equal, again.masks, one.masks))  # and not only because it is kept


def test_nothing_dropped_is_the_full_network():
    assert taken_first(NET, (0.0, 0.0), random_order(NET, Place(0, 0, 0)), True) is NET.full


def test_a_smaller_sub_network_lies_inside_a_larger_one():
    for order in (random_order(NET, Place(0, 1, 2)), own_order(NET), rolled_order(NET, 3)):
        small, large = (taken_first(NET, (rate, rate), order) for rate in (0.7, 0.4))
        assert all((s <= b).all() for s, b in zip(small.masks, large.masks, strict=True))


def test_orders_differ_by_device_or_by_round_only():
    places = [Place(0, round, device) for round in range(3) for device in range(3)]
    own = {tuple(random_order(NET, place).places[0].tolist()) for place in places}
    common = {tuple(common_order(NET, 0, place.round).places[0].tolist()) for place in places}
    assert len(own) > 3 >= len(common) > 1
    assert own_order(NET).places[0].tolist() == [0, 1, 2, 3]
    assert rolled_order(NET, 1).places[0].tolist() == [1, 2, 3, 0]
