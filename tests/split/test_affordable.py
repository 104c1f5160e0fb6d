"""Elastic client parts in the methods that train them by an auxiliary loss."""

import msgspec
import pytest
from tests.split.small_split import LOCAL, run

from pliant.devices import ConstantTrace, Fleet
from pliant.split import AuxSplit, OneShotSplit

METHODS = [AuxSplit(local=LOCAL), OneShotSplit(local=LOCAL, local_share=0.5, passes=1)]
SLOW = Fleet(size=3, speed=ConstantTrace(low=0.5, high=0.5))


@pytest.mark.parametrize("method", METHODS)
def test_at_full_speed_no_filter_is_dropped(method):
    elastic = msgspec.structs.replace(method, elastic=True)
    assert run(elastic)[-1].digest == run(method)[-1].digest


@pytest.mark.parametrize("method", METHODS)
def test_a_slow_client_trains_fewer_filters_and_keeps_pace(method):
    elastic = msgspec.structs.replace(method, elastic=True)
    plain, narrow = run(method, fleet=SLOW)[0], run(elastic, fleet=SLOW)[0]
    assert narrow.macs < 0.75 * plain.macs
    assert narrow.seconds < 0.8 * plain.seconds
    assert narrow.samples == plain.samples
