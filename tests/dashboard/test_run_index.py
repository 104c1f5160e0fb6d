"""The index finds runs below a folder and reads nothing outside it."""

import os
import shutil

import pytest
from tests.dashboard.written_runs import make_lines, write_run

from pliant.dashboard.run_index import RunIndex


def make_index(folder):
    index = RunIndex(folder)
    index.scan()
    return index


def test_runs_at_any_depth_are_summarised(tmp_path):
    write_run(tmp_path / "one", 4)
    write_run(tmp_path / "grid" / "method=fedavg,seed=1", 2, seed=1, method={"type": "fedavg"})
    summaries = {summary.id: summary for summary in make_index(tmp_path).list_summaries()}
    assert set(summaries) == {"one", "grid/method=fedavg,seed=1"}
    assert summaries["one"].is_finished
    assert summaries["one"].accuracy == pytest.approx(1 - 0.9 / 4)
    other = summaries["grid/method=fedavg,seed=1"]
    assert (other.method, other.done, other.rounds) == ("fedavg", 2, 4)
    assert other.about == "digits_cnn · digits · seed 1"
    assert not other.is_finished


def test_runs_of_a_folder_that_differ_in_seed_and_workers_are_one_group(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path / "sweep" / f"a-{seed}", seed=seed, workers={"count": seed})
    write_run(tmp_path / "sweep" / "b", method={"type": "fedavg", "table": {"rates": [[0.0]] * 3}})
    write_run(tmp_path / "other" / "a-0", seed=0)
    summaries = {summary.id: summary for summary in make_index(tmp_path).list_summaries()}
    groups = {name: summary.group for name, summary in summaries.items()}
    assert groups["sweep/a-0"] == groups["sweep/a-1"]
    assert len(set(groups.values())) == 3
    assert {summary.comparison for summary in summaries.values()} == {"sweep", "other"}
    assert (summaries["sweep/b"].table_rows, summaries["sweep/a-0"].table_rows) == (3, 0)


def test_the_folder_may_itself_be_a_run(tmp_path):
    (summary,) = make_index(write_run(tmp_path / "run")).list_summaries()
    assert (summary.id, summary.name) == (".", "run")


def test_only_changed_runs_are_listed(tmp_path):
    run = write_run(tmp_path / "one", 1)
    write_run(tmp_path / "two", 4)
    index = make_index(tmp_path)
    version = index.version
    index.scan()
    assert index.list_summaries(version) == []
    with open(run / "events.jsonl", "ab") as file:
        file.write(make_lines(1))
    index.scan(full=False)
    changed = index.list_summaries(version)
    assert [(summary.id, summary.done) for summary in changed] == [("one", 2)]


def test_a_deleted_run_leaves_the_index(tmp_path):
    run = write_run(tmp_path / "one")
    index = make_index(tmp_path)
    shutil.rmtree(run)
    index.scan()
    assert len(index) == 0
    with pytest.raises(LookupError, match="no run 'one' here"):
        index.get_view("one")


@pytest.mark.parametrize(
    "name", ["../out", "/etc", "one/../../out", "one/..", "", "..", "one\x00", "ONE", "./one"]
)
def test_an_unknown_name_is_refused(tmp_path, name):
    write_run(tmp_path / "out")
    write_run(tmp_path / "in" / "one")
    index = make_index(tmp_path / "in")
    with pytest.raises(LookupError, match="no run"):
        index.get_view(name)
    with pytest.raises(LookupError, match="no run"):
        index.read_config(name)


def test_a_symlinked_folder_is_not_entered(tmp_path):
    write_run(tmp_path / "out")
    write_run(tmp_path / "in" / "one")
    (tmp_path / "in" / "two").symlink_to(tmp_path / "out")
    summaries = make_index(tmp_path / "in").list_summaries()
    assert [summary.id for summary in summaries] == ["one"]


@pytest.mark.parametrize("name", ["config.json", "events.jsonl", "versions.json"])
def test_a_symlinked_file_is_not_read(tmp_path, name):
    out = write_run(tmp_path / "out", method={"type": "secret"})
    run = write_run(tmp_path / "in" / "one")
    os.remove(run / name)
    (run / name).symlink_to(out / name)
    index = make_index(tmp_path / "in")
    assert "secret" not in repr(index.list_summaries()) + repr(index.read_config("one"))
    if name == "events.jsonl":
        assert index.list_summaries()[0].done == 0
        with pytest.raises(OSError, match="symbolic"):
            index.get_view("one").read_more()


def test_a_run_with_a_broken_config_is_listed_without_details(tmp_path):
    run = write_run(tmp_path / "one")
    (run / "config.json").write_bytes(b"{")
    (summary,) = make_index(tmp_path).list_summaries()
    assert (summary.method, summary.rounds, summary.done) == ("", 0, 4)


def test_a_search_is_listed_as_a_search(tmp_path):
    folder = tmp_path / "search"
    folder.mkdir()
    (folder / "config.json").write_text('{"network": {"name": "digits_cnn"}, "search": {}}')
    trial = '{"rates": [0.5, 0.1], "seed": 1, "accuracy": 0.25}\n'
    (folder / "trials.jsonl").write_text(trial + trial.replace("0.25", "0.75"))
    index = make_index(tmp_path)
    (summary,) = index.list_summaries()
    assert summary.is_search
    assert summary.method == "search"
    view = index.get_view("search")
    while view.read_more():
        pass
    assert len(view) == 2
    assert view.get_front_data()["front"] == [(pytest.approx(0.7), 0.5)]


def test_a_search_with_its_table_is_finished(tmp_path):
    search = tmp_path / "search"
    search.mkdir()
    (search / "config.json").write_text('{"format": 2, "search": {}}')
    (search / "trials.jsonl").write_text('{"rates": [0.0], "seed": 1, "accuracy": 0.9}\n')
    index = RunIndex(tmp_path)
    index.scan()
    assert not index.list_summaries()[0].is_finished
    (search / "table.safetensors").touch()
    index.scan(full=False)
    assert index.list_summaries()[0].is_finished
