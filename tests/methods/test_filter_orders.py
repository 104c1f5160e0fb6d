"""Tables of ordered subnets, and the orders they follow."""

import numpy as np
import torch
from torch import nn

from pliant.methods.base import TaskKey
from pliant.methods.filter_orders import (
    make_count_table,
    make_device_order,
    make_fine_widths,
    make_rolling_order,
    make_round_order,
    make_width_table,
    select_prefix,
)
from pliant.nn.elastic import elastic

NET = elastic(
    nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 3, 3), nn.Flatten(), nn.Linear(48, 2)),
    torch.zeros(2, 1, 8, 8),
)


def test_a_table_has_the_costs_of_whole_filters():
    table = make_width_table(NET, (1.0, 0.5))
    assert table.rates == ((0.5, 0.5), (0.0, 0.0))
    half = NET.macs(NET.select_prefix(0.5), training=True) / NET.macs(NET.full, training=True)
    assert table.shares == (half, 1.0)


def test_rows_are_sorted_by_cost():
    # 3 of 4 and 1 of 3 filters, or 1 of 4 and all of 3
    table = make_count_table(NET, ((0.25, 0.7), (0.8, 0.0), (0.0, 0.0)))
    assert list(table.shares) == sorted(table.shares)
    costs = [NET.macs(NET.select_prefix(rates), training=True) for rates in table.rates]
    assert costs == sorted(costs)


def test_fine_widths_go_up_to_the_full_network():
    widths = make_fine_widths(0.25)
    assert widths[0] == 0.25
    assert widths[-1] == 1.0
    assert make_width_table(NET, widths).shares[-1] == 1.0


def test_the_same_key_gives_the_same_subnet_object():
    key = TaskKey(0, 3, 7)
    subnet = select_prefix(NET, (0.5, 0.5), make_device_order(NET, key))
    assert select_prefix(NET, (0.5, 0.5), make_device_order(NET, TaskKey(0, 3, 7))) is subnet
    assert subnet.counts == (2, 2)
    NET.caches.clear()
    redrawn = select_prefix(NET, (0.5, 0.5), make_device_order(NET, key))
    assert all(map(np.array_equal, redrawn.masks, subnet.masks))  # not only because of the cache


def test_rates_of_zero_give_the_full_network():
    order = make_device_order(NET, TaskKey(0, 0, 0))
    assert select_prefix(NET, (0.0, 0.0), order, True) is NET.full


def test_a_smaller_subnet_lies_inside_a_larger_one():
    for order in (
        make_device_order(NET, TaskKey(0, 1, 2)),
        make_rolling_order(NET, 3),
    ):
        small, large = (select_prefix(NET, (rate, rate), order) for rate in (0.7, 0.4))
        assert all((s <= b).all() for s, b in zip(small.masks, large.masks, strict=True))


def test_orders_differ_by_device_or_by_round_only():
    keys = [TaskKey(0, round, device) for round in range(3) for device in range(3)]
    device_orders = {tuple(make_device_order(NET, key).orders[0].tolist()) for key in keys}
    round_orders = {tuple(make_round_order(NET, 0, key.round).orders[0].tolist()) for key in keys}
    assert len(device_orders) > 3 >= len(round_orders) > 1
    assert select_prefix(NET, (0.5, 0.5)).masks[0].tolist() == [True, True, False, False]
    assert make_rolling_order(NET, 1).orders[0].tolist() == [1, 2, 3, 0]
