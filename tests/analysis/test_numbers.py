"""Curves, utilisation and the summary, with numbers one can do by hand."""

import json
import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from tests.analysis.runs_on_disk import write_run

from pliant.analysis.curves import _conclude, compute_learning_curve
from pliant.analysis.runs import group_runs, load_runs, select_finished
from pliant.analysis.style import MISSING, format_short, get_line_style
from pliant.analysis.summary import format_summary, get_budgets, rank_by_c3, summarise_groups
from pliant.analysis.time_to_target import _conclude as _conclude_times
from pliant.analysis.time_to_target import draw_time_to_target
from pliant.analysis.utilisation import compute_utilisation
from pliant.engine.device_scores import DeviceScores


@pytest.fixture
def groups(tmp_path):
    write_run(tmp_path / "method=a,seed=0", [0.2, 0.4], seed=0)
    write_run(tmp_path / "method=a,seed=1", [0.4, 0.8], seed=1)
    write_run(tmp_path / "method=b", [0.9], late={(0, 7)}, method={"type": "b"})
    return select_finished(group_runs(load_runs([tmp_path])))


def test_a_curve_has_the_mean_and_the_spread_over_seeds(groups):
    curve = compute_learning_curve(groups[0], "rounds")
    assert curve.x.tolist() == [1, 2]
    assert curve.mean.tolist() == pytest.approx([0.3, 0.6])
    assert curve.std.tolist() == pytest.approx([math.sqrt(0.02), math.sqrt(0.08)])


def test_a_single_seed_has_no_spread(groups):
    assert compute_learning_curve(groups[1], "bytes").std.tolist() == [0.0]
    assert compute_learning_curve(groups[1], "bytes").x.tolist() == [3000]


def test_a_curve_covers_only_the_range_common_to_all_seeds(tmp_path):
    write_run(tmp_path / "a0", [0.1, 0.3, 0.5], seed=0, rounds=3)
    write_run(tmp_path / "a1", [0.2], seed=1, rounds=3)
    (group,) = select_finished(group_runs(load_runs([tmp_path])))
    curve = compute_learning_curve(group, "rounds")
    assert curve.x.tolist() == [1]
    assert curve.mean.tolist() == pytest.approx([0.15])


def test_compute_is_useful_wasted_or_unused(groups):
    assert compute_utilisation(groups[0]) == pytest.approx((0.5, 0.0, 0.5))
    assert compute_utilisation(groups[1]) == pytest.approx((0.25, 0.25, 0.5))


def test_the_table_shows_how_unequal_devices_are(groups, tmp_path):
    # 90 of 100 and 5 of 10; the worst of two devices is the worst tenth
    scores = DeviceScores((4, 7), (90, 5), (100, 10), sent=500_000)
    write_run(tmp_path / "own", [None, None], on_devices=scores, method={"type": "own"})
    [row] = summarise_groups(select_finished(group_runs(load_runs([tmp_path / "own"]))), target=0.4)
    assert row.mean_accuracy == row.device_accuracy == pytest.approx(95 / 110)
    assert (row.device_spread, row.worst_decile) == pytest.approx((0.2, 0.5))
    header, [texts] = format_summary([row], target=0.4)
    assert dict(zip(header, texts, strict=True))["control MB"] == "1.0"  # two tests
    columns, [cells] = format_summary([row], 0.4)
    table = dict(zip(columns, cells, strict=True))
    assert (table["on devices"], table["spread"]) == ("86.36 %", "20.00 %")
    assert table["worst decile"] == "50.00 %"
    assert "worst decile" not in format_summary(summarise_groups(groups, 0.4), 0.4)[0]


@pytest.mark.parametrize(("devices", "worst"), [(1, 1), (10, 1), (11, 2), (20, 2), (21, 3)])
def test_a_decile_is_a_tenth_of_the_devices_rounded_up(devices, worst):
    scores = DeviceScores(tuple(range(devices)), tuple(range(devices)), (100,) * devices)
    assert scores.worst_decile == pytest.approx(sum(range(worst)) / worst / 100)


def test_the_table_has_means_and_the_c3_score(groups):
    first, second = summarise_groups(groups, target=0.4)
    assert first.accuracy == pytest.approx((0.6, math.sqrt(0.08)))
    assert (first.rounds_to_target, first.seconds_to_target) == (1.5, 1.5)  # round 2 and round 1
    assert (first.gigamacs, first.megabytes, first.lost_share) == (400 / 1e9, 6000 / 1e6, 0)
    assert first.c3 == pytest.approx(0.6 * math.exp(-2 / 8))  # the largest use of both
    assert second.c3 == pytest.approx(0.9 * math.exp(-(3000 / 6000 + 200 / 400) / 8))
    assert second.lost_share == 0.5


def test_the_order_by_c3_may_depend_on_the_budgets(groups):
    """The cheap group is ahead by 0.5 · 2 / 8 in the exponent, and twice or half of that."""
    costly, cheap = summarise_groups(groups, target=0.4)
    assert get_budgets([costly, cheap]) == (6000 / 1e6, 400 / 1e9)
    costly = replace(costly, accuracy=(0.9 * math.exp(0.2), 0.0))
    rows = [costly, cheap]
    assert rank_by_c3(rows) == rank_by_c3(rows, 2.0) == [costly.label, cheap.label]
    assert rank_by_c3(rows, 0.5) == [cheap.label, costly.label]


def test_visited_images_and_the_score_after_local_training_are_shown(tmp_path):
    folder = write_run(tmp_path / "a", [0.1, 0.3])
    events = folder / "events.jsonl"
    *lines, last = events.read_text().splitlines()
    personal = {"per_device": [0.3, 0.5], "after_training": [0.5, 0.7]}
    total = json.loads(last) | {"personal": personal}
    lines.append(json.dumps(total, separators=(",", ":")))
    events.write_text("\n".join(lines) + "\n")
    rows = summarise_groups(select_finished(group_runs(load_runs([tmp_path]))), 0.9)
    assert rows[0].images == 2 * 2 * 8  # rounds, devices, images
    assert rows[0].c3 == pytest.approx(0.4 * math.exp(-2 / 8))
    assert rows[0].local_c3 == pytest.approx(0.6 * math.exp(-2 / 8))
    header, [texts] = format_summary(rows, 0.9)
    assert texts[header.index("images")] == "32"
    assert texts[header.index("C3 local")] == f"{0.6 * math.exp(-2 / 8):.3f}"


def test_a_target_that_one_seed_missed_is_not_reached(groups):
    assert summarise_groups(groups, target=0.5)[0].rounds_to_target is None


def test_columns_without_a_number_are_left_out(groups):
    header, rows = format_summary(summarise_groups(groups, 0.99), 0.99)
    assert "joules" not in header
    assert "rounds to 99%" not in header
    assert rows[0][header.index("accuracy")] == "60.00 ± 28.28 %"
    assert rows[1][header.index("accuracy")] == "90.00 %"


def test_forty_line_styles_are_distinct():
    styles = [get_line_style(index) for index in range(40)]
    distinct = {(style["color"], str(style["linestyle"]), style["marker"]) for style in styles}
    assert len(distinct) == 40
    assert all(a["linestyle"] != b["linestyle"] for a, b in pairwise(styles))


@pytest.mark.parametrize(("value", "text"), [(1.5e9, "1.5 G"), (999, "999"), (12_345, "12.3 k")])
def test_numbers_are_shortened_by_a_prefix(value, text):
    assert format_short(np.float64(value)) == text


def test_rows_that_are_compared_at_different_times_share_a_column(groups):
    row = replace(summarise_groups(groups, 0.4)[0], equal_seconds=None, equal_accuracy=None)
    first, second = (replace(row, equal_seconds=s, equal_accuracy=0.4) for s in (3.0, 5.0))
    assert "at 3 s" in format_summary([first, row], 0.9)[0]
    header, texts = format_summary([first, second, row], 0.9)
    column = [cells[header.index("at equal time")] for cells in texts]
    assert column == ["40.00 %", "40.00 %", MISSING]


def test_a_conclusion_leaves_out_curves_that_begin_later(groups, tmp_path):
    write_run(tmp_path / "method=z", [None, None, 0.9], method={"type": "c"})
    a, _, later = select_finished(group_runs(load_runs([tmp_path])))
    curve, late = (compute_learning_curve(group, "seconds") for group in (a, later))
    assert "follows" in _conclude([curve, curve], "seconds")
    assert _conclude([curve, late], "seconds") == (
        "After 2 seconds, a has 60.00 %; the others are evaluated later."
    )


def test_a_conclusion_has_the_numbers_of_the_table(groups):
    a, b = summarise_groups(groups, 0.9)
    assert (a.equal_accuracy, b.equal_accuracy) == pytest.approx((0.3, 0.9))
    curves = [compute_learning_curve(group, "seconds") for group in groups]
    assert _conclude(curves, "seconds") == (
        "After 1 second, b has 90.00 %, the most; a follows 60.0 points behind."
    )


def test_a_conclusion_takes_no_accuracy_between_two_evaluations(tmp_path):
    write_run(tmp_path / "a", [0.2, None, None, 0.8], method={"type": "a"})
    write_run(tmp_path / "b", [0.1, None, 0.3], method={"type": "b"})
    groups = select_finished(group_runs(load_runs([tmp_path])))
    curves = [compute_learning_curve(group, "seconds") for group in groups]
    assert [row.equal_accuracy for row in summarise_groups(groups, 0.9)] == [0.2, 0.3]
    assert "b has 30.00 %, the most; a follows 10.0 points" in _conclude(curves, "seconds")


def test_the_time_to_a_target_is_compared_where_the_data_are_the_same(tmp_path):
    pytest.importorskip("matplotlib")
    split = {"method": {"type": "split"}, "data": {"proxy": 1}}
    write_run(tmp_path / "fed", [0.2, 0.9], data={"proxy": 2})
    write_run(tmp_path / "split", [0.9, 0.9], **split)
    groups = select_finished(group_runs(load_runs([tmp_path])))
    assert draw_time_to_target(groups, 0.9).conclusion == (
        "Federated methods: fed reaches 90% first, after 2.0 s. "
        "Split methods: split reaches 90% first, after 1.0 s."
    )
    assert "split reaches 90% first, after 1.0 s; fed takes 2.00 times as long." in (
        _conclude_times("", {"fed": [2.0], "split": [1.0]}, 0.9)
    )
