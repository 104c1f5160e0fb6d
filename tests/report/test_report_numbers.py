"""Curves, shares and the table, with numbers that one can do by hand."""

import math
from itertools import pairwise

import numpy as np
import pytest
from runs_on_disk import write_run

from pliant.report.curves import curve
from pliant.report.history import Lake, load_samples
from pliant.report.look import line, short
from pliant.report.runs import grouped, load_runs
from pliant.report.summary import summarised, table_of
from pliant.report.use import shares


@pytest.fixture
def samples(tmp_path):
    write_run(tmp_path / "method=a,seed=0", [0.2, 0.4], seed=0)
    write_run(tmp_path / "method=a,seed=1", [0.4, 0.8], seed=1)
    write_run(tmp_path / "method=b", [0.9], late={(0, 7)}, method={"type": "b"})
    lake = Lake()
    yield load_samples(lake, grouped(load_runs([tmp_path])))
    lake.close()


def test_a_curve_has_the_mean_and_the_spread_over_seeds(samples):
    found = curve(samples[0], "rounds")
    assert found.x.tolist() == [1, 2]
    assert found.mean.tolist() == pytest.approx([0.3, 0.6])
    assert found.spread.tolist() == pytest.approx([math.sqrt(0.02), math.sqrt(0.08)])


def test_a_single_seed_has_no_spread(samples):
    assert curve(samples[1], "bytes").spread.tolist() == [0.0]
    assert curve(samples[1], "bytes").x.tolist() == [3000]


def test_seeds_of_different_length_are_compared_where_both_are(tmp_path):
    write_run(tmp_path / "a0", [0.1, 0.3, 0.5], seed=0, rounds=3)
    write_run(tmp_path / "a1", [0.2], seed=1, rounds=3)
    lake = Lake()
    (sample,) = load_samples(lake, grouped(load_runs([tmp_path])))
    lake.close()
    found = curve(sample, "rounds")
    assert found.x.tolist() == [1]
    assert found.mean.tolist() == pytest.approx([0.15])


def test_compute_is_useful_in_vain_or_not_used(samples):
    assert shares(samples[0]) == pytest.approx((0.5, 0.0, 0.5))
    assert shares(samples[1]) == pytest.approx((0.25, 0.25, 0.5))


def test_the_table_has_means_and_the_c3_score(samples):
    first, second = summarised(samples, target=0.4)
    assert first.accuracy == pytest.approx((0.6, math.sqrt(0.08)))
    assert first.reached == pytest.approx((1.5, 1.5))  # round 2 and round 1
    assert (first.macs, first.traffic, first.lost) == (400, 6000, 0)
    assert first.c3 == pytest.approx(0.6 * math.exp(-2 / 8))  # the greediest in both
    assert second.c3 == pytest.approx(0.9 * math.exp(-(3000 / 6000 + 200 / 400) / 8))
    assert second.lost == 0.5


def test_a_target_that_one_seed_missed_is_not_reached(samples):
    assert summarised(samples, target=0.5)[0].reached is None


def test_columns_without_a_number_are_left_out(samples):
    head, rows = table_of(summarised(samples, 0.99), 0.99)
    assert "joules" not in head
    assert "rounds to 99%" not in head
    assert rows[0][head.index("accuracy")] == "60.00 ± 28.28 %"
    assert rows[1][head.index("accuracy")] == "90.00 %"


def test_forty_lines_can_be_told_apart():
    drawn = [line(number) for number in range(40)]
    seen = {(one["color"], str(one["linestyle"]), one["marker"]) for one in drawn}
    assert len(seen) == 40
    assert all(a["linestyle"] != b["linestyle"] for a, b in pairwise(drawn))


@pytest.mark.parametrize(("value", "text"), [(1.5e9, "1.5 G"), (999, "999"), (12_345, "12.3 k")])
def test_numbers_are_short(value, text):
    assert short(np.float64(value)) == text
