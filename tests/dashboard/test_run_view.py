"""The view of a run, from real records."""

import math
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.analysis.runs_on_disk import write_run as write_own_run
from tests.dashboard.written_runs import make_lines, write_run

from pliant.dashboard.run_view import COLUMNS, MAX_POINTS, RunView, thin_indices
from pliant.engine.device_scores import DeviceScores


def read_view(folder):
    view = RunView(folder / "events.jsonl")
    while view.read_more():
        pass
    return view


def test_rounds_become_columns_and_costs_add_up(tmp_path):
    columns = read_view(write_run(tmp_path / "run", 3)).get_columns_since(0)
    assert columns["round"] == [1, 2, 3]
    assert columns["seconds"] == [1.0, 2.0, 3.0]
    assert columns["macs"] == [800.0, 1600.0, 2400.0]  # two devices, four steps of 100
    assert columns["bytes"] == [4000.0, 8000.0, 12000.0]
    assert columns["accuracy"] == pytest.approx([0.1, 0.55, 0.7])
    assert columns["used"] == [0.8, 0.8, 0.8]
    assert columns["merged"] == [1.0, 1.0, 1.0]


def test_tests_by_devices_become_columns(tmp_path):
    scores = DeviceScores((4, 7), (90, 5), (100, 10))
    columns = read_view(write_own_run(tmp_path / "run", [None], on_devices=scores))
    [values] = zip(*columns.get_columns_since(0).values(), strict=True)
    shown = dict(zip(COLUMNS, values, strict=True))
    assert shown["accuracy"] == shown["devices"] == pytest.approx(95 / 110)
    assert (shown["spread"], shown["worst"]) == pytest.approx((0.2, 0.5))


def test_only_new_rounds_are_returned(tmp_path):
    folder = write_run(tmp_path / "run", 2)
    view = read_view(folder)
    with open(folder / "events.jsonl", "ab") as file:
        file.write(make_lines(2))
    view.read_more()
    assert view.get_columns_since(2)["round"] == [3]
    assert view.get_columns_since(3)["round"] == []


def test_a_round_without_a_score_has_no_accuracy(tmp_path):
    folder = write_run(tmp_path / "run", 0)
    (folder / "events.jsonl").write_bytes(make_lines(0, is_scored=False))
    assert read_view(folder).get_columns_since(0)["accuracy"] == [None]


def test_the_side_of_scaled_images_is_kept(tmp_path):
    folder = write_run(tmp_path / "run", 0)
    line = b'{"type":"round","round":%d,"seconds":1.0%s}\n'
    lines = line % (0, b',"side":16') + line % (1, b"")
    (folder / "events.jsonl").write_bytes(lines)
    view = read_view(folder)
    assert view.get_columns_since(0)["side"] == [16, None]
    assert [r["side"] for r in view.read_timeline(last=2, count=2)["rounds"]] == [16, None]


def test_the_accuracy_is_the_mean_of_the_devices_own_tests(tmp_path):
    folder = write_run(tmp_path / "run", 0)
    line = b'{"type":"round","round":0,"seconds":1.0,"personal":{"per_device":[0.25,0.75]}}\n'
    (folder / "events.jsonl").write_bytes(line)
    assert read_view(folder).get_columns_since(0)["accuracy"] == [0.5]


def test_the_timeline_has_the_mini_batches_of_the_requested_rounds(tmp_path):
    view = read_view(write_run(tmp_path / "run", 4))
    timeline = view.read_timeline(last=3, count=2)
    rounds = timeline["rounds"]
    assert (timeline["first"], timeline["last"], timeline["known"]) == (2, 3, 4)
    assert [(r["opened"], r["closed"]) for r in rounds] == [(1.0, 2.0), (2.0, 3.0)]
    task = rounds[0]["tasks"][1]
    assert task["device"] == 1
    assert task["starts"] == pytest.approx([0.0, 0.2, 0.4, 0.6])
    assert task["rows"] == [0, 1, 2, 3]
    assert view.read_timeline(last=99, count=3)["last"] == 4


def test_a_mini_batch_that_was_cut_off_ends_when_the_device_stopped(tmp_path):
    folder = write_run(tmp_path / "run", 0)
    text = (
        b'{"type":"task","round":0,"device":3,"outcome":"late","seconds":0.9,"starts":[0.0,0.5],'
        b'"ends":[0.5],"rows":[1,0]}\n{"type":"round","round":0,"seconds":1.0}\n'
    )
    (folder / "events.jsonl").write_bytes(text)
    task = read_view(folder).read_timeline(1, 1)["rounds"][0]["tasks"][0]
    assert task["end"] == "late"
    assert task["ends"] == [0.5, 0.9]


def test_lines_that_are_no_records_are_skipped(tmp_path):
    folder = write_run(tmp_path / "run", 1)
    with open(folder / "events.jsonl", "ab") as file:
        file.write(b'garbage\n{"type":"other"}\n' + make_lines(1))
    assert read_view(folder).get_columns_since(0)["round"] == [1, 2]


def test_a_run_that_went_back_to_its_checkpoint_is_read_again(tmp_path):
    folder = write_run(tmp_path / "run", 3)
    view = read_view(folder)
    (folder / "events.jsonl").write_bytes(make_lines(0, accuracy=0.3))
    view.read_more()
    assert len(view) == 1
    assert view.get_columns_since(0)["accuracy"] == [0.3]


def test_long_curves_are_thinned(tmp_path):
    folder = write_run(tmp_path / "run", 0)
    line = b'{"type":"round","round":%d,"seconds":%d}\n'
    text = b"".join(line % (number, number + 1) for number in range(5000))
    (folder / "events.jsonl").write_bytes(text)
    rounds = read_view(folder).get_columns_since(0)["round"]
    assert len(rounds) == MAX_POINTS
    assert rounds[-1] == 5000


@given(
    values=st.lists(st.floats(0, 1) | st.just(math.nan), min_size=1, max_size=80),
    limit=st.integers(1, 20),
    data=st.data(),
)
def test_thinning_keeps_the_end_the_order_and_the_scores(values, limit, data):
    first = data.draw(st.integers(0, len(values) - 1))
    indices = thin_indices(array("d", values), first, limit)
    assert len(indices) == min(limit, len(values) - first)
    assert indices == sorted(set(indices))
    assert indices[0] >= first
    assert indices[-1] == len(values) - 1
    if len(values) - first > limit and any(map(math.isfinite, values[first:])) and limit > 1:
        scored = [i for i in range(first, len(values)) if math.isfinite(values[i])]
        assert any(math.isfinite(values[i]) for i in indices) or scored[0] >= indices[-2]
