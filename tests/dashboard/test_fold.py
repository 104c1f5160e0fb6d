"""What the page is told of a run, from real records."""

import math
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from written import lines, write_run

from pliant.dashboard.fold import POINTS, Fold, thinned


def folded(folder):
    fold = Fold(folder / "events.jsonl")
    while fold.feed():
        pass
    return fold


def test_rounds_become_columns_and_costs_add_up(tmp_path):
    fold = folded(write_run(tmp_path / "run", 3))
    columns = fold.since(0)
    assert columns["round"] == [1, 2, 3]
    assert columns["seconds"] == [1.0, 2.0, 3.0]
    assert columns["macs"] == [800.0, 1600.0, 2400.0]  # two devices, four steps of 100
    assert columns["bytes"] == [4000.0, 8000.0, 12000.0]
    assert columns["accuracy"] == pytest.approx([0.1, 0.55, 0.7])
    assert columns["used"] == [0.8, 0.8, 0.8]
    assert columns["merged"] == [1.0, 1.0, 1.0]


def test_only_what_is_new_is_told(tmp_path):
    folder = write_run(tmp_path / "run", 2)
    fold = folded(folder)
    with open(folder / "events.jsonl", "ab") as file:
        file.write(lines(2))
    fold.feed()
    assert fold.since(2)["round"] == [3]
    assert fold.since(3)["round"] == []


def test_a_round_without_a_score_has_no_accuracy(tmp_path):
    folder = write_run(tmp_path / "run", 0)
    (folder / "events.jsonl").write_bytes(lines(0, is_scored=False))
    assert folded(folder).since(0)["accuracy"] == [None]


def test_devices_with_tests_of_their_own_count_by_their_mean(tmp_path):
    folder = write_run(tmp_path / "run", 0)
    line = b'{"type":"round","round":0,"seconds":1.0,"personal":{"each":[0.25,0.75]}}\n'
    (folder / "events.jsonl").write_bytes(line)
    assert folded(folder).since(0)["accuracy"] == [0.5]


def test_the_timeline_has_the_mini_batches_of_the_rounds_asked_for(tmp_path):
    fold = folded(write_run(tmp_path / "run", 4))
    shown = fold.timeline(last=3, count=2)
    assert (shown["first"], shown["last"], shown["known"]) == (2, 3, 4)
    assert [(one["opened"], one["closed"]) for one in shown["rounds"]] == [(1.0, 2.0), (2.0, 3.0)]
    task = shown["rounds"][0]["tasks"][1]
    assert task["device"] == 1
    assert task["starts"] == pytest.approx([0.0, 0.2, 0.4, 0.6])
    assert task["rows"] == [0, 1, 2, 3]
    assert fold.timeline(last=99, count=3)["last"] == 4


def test_a_mini_batch_that_was_cut_off_ends_with_the_work(tmp_path):
    folder = write_run(tmp_path / "run", 0)
    text = (
        b'{"type":"task","round":0,"device":3,"end":"late","seconds":0.9,"starts":[0.0,0.5],'
        b'"ends":[0.5],"rows":[1,0]}\n{"type":"round","round":0,"seconds":1.0}\n'
    )
    (folder / "events.jsonl").write_bytes(text)
    task = folded(folder).timeline(1, 1)["rounds"][0]["tasks"][0]
    assert task["ends"] == [0.5, 0.9]


def test_lines_that_are_no_records_are_passed_over(tmp_path):
    folder = write_run(tmp_path / "run", 1)
    with open(folder / "events.jsonl", "ab") as file:
        file.write(b'garbage\n{"type":"other"}\n' + lines(1))
    assert folded(folder).since(0)["round"] == [1, 2]


def test_a_run_that_went_back_to_its_checkpoint_is_told_anew(tmp_path):
    folder = write_run(tmp_path / "run", 3)
    fold = folded(folder)
    (folder / "events.jsonl").write_bytes(lines(0, accuracy=0.3))
    fold.feed()
    assert len(fold) == 1
    assert fold.since(0)["accuracy"] == [0.3]


def test_long_curves_are_thinned(tmp_path):
    folder = write_run(tmp_path / "run", 0)
    many = b"".join(
        b'{"type":"round","round":%d,"seconds":%d}\n' % (at, at + 1) for at in range(5000)
    )
    (folder / "events.jsonl").write_bytes(many)
    rounds = folded(folder).since(0)["round"]
    assert len(rounds) == POINTS
    assert rounds[-1] == 5000


@given(
    values=st.lists(st.floats(0, 1) | st.just(math.nan), min_size=1, max_size=80),
    most=st.integers(1, 20),
    data=st.data(),
)
def test_thinning_keeps_the_end_the_order_and_the_scores(values, most, data):
    first = data.draw(st.integers(0, len(values) - 1))
    places = thinned(array("d", values), first, most)
    assert len(places) == min(most, len(values) - first)
    assert places == sorted(set(places))
    assert places[0] >= first
    assert places[-1] == len(values) - 1
    if len(values) - first > most and any(map(math.isfinite, values[first:])) and most > 1:
        scored = [at for at in range(first, len(values)) if math.isfinite(values[at])]
        assert any(math.isfinite(values[at]) for at in places) or scored[0] >= places[-2]
