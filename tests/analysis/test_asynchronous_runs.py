"""Reports and pages of a run without rounds, on a real one."""

import pytest
from msgspec.structs import replace
from tests.engine.small_runs import FLEET, LOCAL, SETTINGS, data, network

from pliant.analysis.curves import draw_learning_curves
from pliant.analysis.runs import group_runs, load_runs
from pliant.analysis.summary import summarise_groups
from pliant.analysis.timeline import draw_timeline, load_tasks
from pliant.dashboard.run_index import RunIndex
from pliant.dashboard.run_view import RunView
from pliant.engine.evaluation import Evaluation
from pliant.engine.ledger import RoundRecord, TaskRecord
from pliant.engine.run_store import read_records
from pliant.engine.simulate import simulate
from pliant.methods import FedAvg, FedBuff


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("asynchronous") / "run"
    method = FedBuff(FedAvg(LOCAL), buffer=2, concurrency=5)
    settings = replace(SETTINGS, seconds=4.5, evaluation=Evaluation(every_seconds=1.0))
    for _ in simulate(method, network(), data(), FLEET, settings=settings, folder=folder):
        pass
    return folder


@pytest.fixture
def run(folder):
    [run] = load_runs([folder])
    return run


def read(folder, kind):
    return [record for record in read_records(folder) if isinstance(record, kind)]


def test_a_timeline_shows_the_tasks_of_the_first_seconds_when_they_ran(folder, run):
    shown = {(task.device, task.starts[0]): task for task in load_tasks(run, 0, 2)}
    expected = {
        (task.device, task.sent_at + task.starts[0]): task.sent_at + task.ends[0]
        for task in read(folder, TaskRecord)
        if task.starts and task.ends and task.sent_at < 2.0
    }
    assert expected.items() <= {key: task.ends[0] for key, task in shown.items()}.items()
    assert {round(sent, 9) for _, sent in shown} != {0.0}
    merges = run["seconds"].tolist()
    figure = draw_timeline("0", "run", list(shown.values()), None, None, merges)
    assert "versions: a bar is" in figure.alt_text
    assert "in round" not in figure.alt_text


def test_curves_have_the_axis_of_seconds(run):
    groups = group_runs([run])
    by_seconds, by_rounds = (draw_learning_curves(groups, axis) for axis in ("seconds", "rounds"))
    times = [row[1] for row in by_seconds.rows]
    assert times[-1] == 4.5
    assert [int(time) for time in times[:-1]] == [1, 2, 3, 4]
    assert "versions of asynchronous runs" in by_rounds.title


def test_costs_and_the_score_count_all_versions(folder, run):
    [row] = summarise_groups(group_runs([run]), 0.1)
    tasks = read(folder, TaskRecord)
    assert row.seconds == 4.5
    assert row.gigamacs == pytest.approx(sum(task.macs for task in tasks) / 1e9)
    assert row.lost_share == pytest.approx(sum(task.steps == 0 for task in tasks) / len(tasks))
    assert 0 < row.c3 < row.mean_accuracy


def test_the_dashboard_shows_when_tasks_ran(folder):
    view = RunView(folder / "events.jsonl")
    while view.read_more():
        pass
    timeline = view.read_timeline(3, 1)
    [shown] = timeline["rounds"]
    tasks = [task for task in read(folder, TaskRecord) if task.round == 2]
    assert timeline["unit"] == "version"
    assert [shown["opened"] + task["starts"][0] for task in shown["tasks"]] == pytest.approx(
        [task.sent_at + task.starts[0] for task in tasks], abs=1e-5
    )


def test_a_run_that_ended_by_its_seconds_is_finished(folder):
    index = RunIndex(folder)
    index.scan()
    [summary] = index.list_summaries()
    versions = read(folder, RoundRecord)
    assert (summary.is_finished, summary.rounds, summary.done) == (
        True,
        len(versions),
        len(versions),
    )
    assert versions[-1].staleness is not None
