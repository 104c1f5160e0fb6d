import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.devices import (
    FULL_NETWORK,
    CostRows,
    DeviceStatus,
    FixedChoice,
    PerBatch,
    PerRound,
    RowChoice,
)

ROWS = CostRows((0.25, 0.5, 1.0))


def make_status(speed, *, time_left=1.0, full_macs=10.0, full_macs_left=40.0):
    def array(value):
        return np.array([value], float)

    return DeviceStatus(
        devices=np.array([7]),
        step=0,
        now=array(1.0 - time_left),
        speed=array(speed),
        time_left=array(time_left),
        round_seconds=1.0,
        full_macs=array(full_macs),
        full_macs_left=array(full_macs_left),
        full_macs_in_round=array(40.0),
    )


@pytest.mark.parametrize(
    ("speed", "row"), [(0.0, 0), (9.0, 0), (10.0, 0), (19.9, 0), (20.0, 1), (39.9, 1), (40.0, 2)]
)
def test_the_largest_row_that_fits_is_chosen_or_else_the_first(speed, row):
    choice = PerBatch(ROWS).choose(make_status(speed))
    assert choice.row.tolist() == [row]
    assert choice.macs.tolist() == [ROWS.shares[row] * 10.0]


def test_only_the_paced_budget_shrinks_for_a_late_device():
    late = make_status(40.0, time_left=0.25, full_macs_left=20.0)
    assert PerBatch(ROWS, "as-written").choose(late).row.tolist() == [2]
    assert PerBatch(ROWS, "paced").choose(late).row.tolist() == [1]
    assert PerBatch(ROWS, "paced").choose(make_status(40.0, time_left=-0.1)).row.tolist() == [0]


def test_a_margin_lowers_the_budget():
    assert PerRound(ROWS).choose(make_status(40.0)).row.tolist() == [2]
    assert PerRound(ROWS, margin=0.7).choose(make_status(40.0)).row.tolist() == [1]
    assert FULL_NETWORK.choose(make_status(0.1)).macs.tolist() == [10.0]


@given(
    batches=st.integers(1, 100),
    full=st.floats(1.0, 1e12),
    length=st.floats(1e-3, 1e6),
    data=st.data(),
)
def test_full_speed_always_takes_the_full_row(batches, full, length, data):
    # rounding must not take the largest row from a device that has just enough for it
    step = data.draw(st.integers(0, batches - 1))
    now = length * step / batches
    values = [now, batches * full / length, length - now]
    arrays = [np.array([value]) for value in values]
    costs = [np.array([value]) for value in (full, (batches - step) * full, batches * full)]
    status = DeviceStatus(np.array([0]), step, *arrays, length, *costs)
    for policy in (PerBatch(ROWS), PerBatch(ROWS, "paced"), PerRound(ROWS)):
        assert policy.choose(status).row.tolist() == [2]
        assert policy.choose(status).macs.tolist() == [full]


def test_a_fixed_choice_is_repeated_per_device():
    status = make_status(1.0)._replace(devices=np.array([7, 3]), full_macs=np.array([10.0, 20.0]))
    policy = FixedChoice(status, RowChoice(np.array([1, 2]), np.array([5.0, 20.0])))
    other = status._replace(devices=np.array([3]), full_macs=np.array([40.0]))
    assert policy.choose(other).row.tolist() == [2]
    assert policy.choose(other).macs.tolist() == [40.0]


@pytest.mark.parametrize("shares", [(), (0.0, 1.0), (float("nan"),)])
def test_shares_that_are_not_above_zero_are_rejected(shares):
    with pytest.raises(ValueError, match="Expected shares above 0"):
        CostRows(shares)


@pytest.mark.parametrize("make_policy", [PerBatch, PerRound])
def test_shares_that_do_not_rise_are_rejected_where_devices_choose(make_policy):
    rows = CostRows((0.5, 0.25))
    with pytest.raises(ValueError, match="rising shares"):
        make_policy(rows)
    assert PerBatch(rows, budget="unlimited").rows is rows
