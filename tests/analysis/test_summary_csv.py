"""The summary as numbers: every cell is a number or empty, and each number has its spread."""

import math
from statistics import stdev

import pytest
from tests.analysis.runs_on_disk import write_run

from pliant.analysis.runs import group_runs, load_runs, select_finished
from pliant.analysis.summary import summarise_groups
from pliant.analysis.summary_csv import HEADER, NUMBERS, list_summary_numbers


@pytest.fixture
def cells(tmp_path):
    write_run(tmp_path / "method=a,seed=0", [0.2, 0.4], seed=0)
    write_run(tmp_path / "method=a,seed=1", [0.4, 0.8], late={(0, 7)}, seed=1)
    write_run(tmp_path / "method=b", [0.9], method={"type": "b"})
    groups = select_finished(group_runs(load_runs([tmp_path])))
    rows = list_summary_numbers(groups, summarise_groups(groups, 0.4), 0.4)
    return [dict(zip(HEADER, row, strict=True)) for row in rows]


def test_every_cell_but_the_name_is_a_number_or_empty(cells):
    for row in cells:
        assert row.pop("group") in ("a", "b")
        assert all(math.isfinite(float(text)) for text in row.values() if text)
    assert {f"{name}_std" for name in NUMBERS} < set(HEADER)


def test_numbers_are_means_and_spreads_over_seeds(cells):
    first, second = cells
    assert float(first["accuracy"]) == pytest.approx(0.6)
    assert float(first["accuracy_std"]) == pytest.approx(stdev([0.4, 0.8]))
    assert float(first["seconds_to_target"]) == pytest.approx(1.5)
    assert float(first["seconds_to_target_std"]) == pytest.approx(stdev([2, 1]))
    assert float(first["lost_share_std"]) == pytest.approx(stdev([0, 0.25]))
    scores = [accuracy * math.exp(-2 / 8) for accuracy in (0.4, 0.8)]  # the largest use of both
    assert float(first["c3_std"]) == pytest.approx(stdev(scores))
    assert (second["seeds"], second["accuracy"], second["accuracy_std"]) == ("1", "0.9", "")
    assert float(second["equal_seconds"]) == 1.0
    assert first["epsilon"] == first["epsilon_std"] == ""
