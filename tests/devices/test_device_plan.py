import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.devices import FULL, Choice, Given, Moment, PerBatch, PerRound, Rows

ROWS = Rows((0.25, 0.5, 1.0))


def moment(speed, *, time_left=1.0, full=10.0, full_left=40.0):
    def one(value):
        return np.array([value], float)

    return Moment(
        devices=np.array([7]),
        step=0,
        now=one(1.0 - time_left),
        speed=one(speed),
        time_left=one(time_left),
        round_seconds=1.0,
        full=one(full),
        full_left=one(full_left),
        full_round=one(40.0),
    )


@pytest.mark.parametrize(
    ("speed", "row"), [(0.0, 0), (9.0, 0), (10.0, 0), (19.9, 0), (20.0, 1), (39.9, 1), (40.0, 2)]
)
def test_the_largest_row_that_fits_else_the_first(speed, row):
    choice = PerBatch(ROWS).choose(moment(speed))
    assert choice.row.tolist() == [row]
    assert choice.macs.tolist() == [ROWS.shares[row] * 10.0]


def test_a_late_device_is_paced_and_one_as_written_is_not():
    late = moment(40.0, time_left=0.25, full_left=20.0)
    assert PerBatch(ROWS, "as-written").choose(late).row.tolist() == [2]
    assert PerBatch(ROWS, "paced").choose(late).row.tolist() == [1]
    assert PerBatch(ROWS, "paced").choose(moment(40.0, time_left=-0.1)).row.tolist() == [0]


def test_a_margin_plans_for_less():
    assert PerRound(ROWS).choose(moment(40.0)).row.tolist() == [2]
    assert PerRound(ROWS, margin=0.7).choose(moment(40.0)).row.tolist() == [1]
    assert FULL.choose(moment(0.1)).macs.tolist() == [10.0]


@given(
    batches=st.integers(1, 100),
    full=st.floats(1.0, 1e12),
    length=st.floats(1e-3, 1e6),
    done=st.data(),
)
def test_full_speed_always_takes_the_full_row(batches, full, length, done):
    # rounding must not take the largest row from a device that has just enough for it
    step = done.draw(st.integers(0, batches - 1))
    now = length * step / batches
    values = [now, batches * full / length, length - now]
    arrays = [np.array([value]) for value in values]
    costs = [np.array([value]) for value in (full, (batches - step) * full, batches * full)]
    state = Moment(np.array([0]), step, *arrays, length, *costs)
    for plan in (PerBatch(ROWS), PerBatch(ROWS, "paced"), PerRound(ROWS)):
        assert plan.choose(state).row.tolist() == [2]
        assert plan.choose(state).macs.tolist() == [full]


def test_what_was_given_is_kept_by_device():
    state = moment(1.0)._replace(devices=np.array([7, 3]), full=np.array([10.0, 20.0]))
    given_plan = Given(state, Choice(np.array([1, 2]), np.array([5.0, 20.0])))
    other = state._replace(devices=np.array([3]), full=np.array([40.0]))
    assert given_plan.choose(other).row.tolist() == [2]
    assert given_plan.choose(other).macs.tolist() == [40.0]


@pytest.mark.parametrize("shares", [(), (0.0, 1.0), (0.5, 0.25), (float("nan"),)])
def test_a_table_that_does_not_rise_is_refused(shares):
    with pytest.raises(ValueError, match="rising shares above 0"):
        Rows(shares)
