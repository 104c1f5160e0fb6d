"""Runs are found below a folder, and nothing outside it is read."""

import os

import pytest
from written import lines, write_run

from pliant.dashboard.shelf import Shelf


def shelf_of(folder):
    shelf = Shelf(folder)
    shelf.scan()
    return shelf


def test_runs_at_any_depth_are_told_in_a_few_words(tmp_path):
    write_run(tmp_path / "one", 4)
    write_run(tmp_path / "grid" / "method=fedavg,seed=1", 2, seed=1, method={"type": "fedavg"})
    found = {one.id: one for one in shelf_of(tmp_path).summaries()}
    assert set(found) == {"one", "grid/method=fedavg,seed=1"}
    assert found["one"].is_finished
    assert found["one"].accuracy == pytest.approx(1 - 0.9 / 4)
    other = found["grid/method=fedavg,seed=1"]
    assert (other.method, other.done, other.rounds) == ("fedavg", 2, 4)
    assert other.about == "digits_cnn · digits · seed 1"
    assert not other.is_finished


def test_the_folder_may_itself_be_a_run(tmp_path):
    (one,) = shelf_of(write_run(tmp_path / "run")).summaries()
    assert (one.id, one.name) == (".", "run")


def test_only_what_has_changed_is_told(tmp_path):
    run = write_run(tmp_path / "one", 1)
    write_run(tmp_path / "two", 4)
    shelf = shelf_of(tmp_path)
    version = shelf.version
    shelf.scan()
    assert shelf.summaries(version) == []
    with open(run / "events.jsonl", "ab") as file:
        file.write(lines(1))
    shelf.scan(anew=False)
    assert [(one.id, one.done) for one in shelf.summaries(version)] == [("one", 2)]


def test_a_run_that_is_gone_is_gone(tmp_path):
    run = write_run(tmp_path / "one")
    shelf = shelf_of(tmp_path)
    for path in run.iterdir():
        path.unlink()
    run.rmdir()
    shelf.scan()
    assert len(shelf) == 0
    with pytest.raises(LookupError, match="no run 'one' here"):
        shelf.fold("one")


@pytest.mark.parametrize(
    "name", ["../out", "/etc", "one/../../out", "one/..", "", "..", "one\x00", "ONE", "./one"]
)
def test_a_name_that_was_not_found_is_refused(tmp_path, name):
    write_run(tmp_path / "out")
    write_run(tmp_path / "in" / "one")
    shelf = shelf_of(tmp_path / "in")
    with pytest.raises(LookupError, match="no run"):
        shelf.fold(name)
    with pytest.raises(LookupError, match="no run"):
        shelf.config(name)


def test_a_linked_folder_is_not_entered(tmp_path):
    write_run(tmp_path / "out")
    write_run(tmp_path / "in" / "one")
    (tmp_path / "in" / "two").symlink_to(tmp_path / "out")
    assert [one.id for one in shelf_of(tmp_path / "in").summaries()] == ["one"]


@pytest.mark.parametrize("name", ["config.json", "events.jsonl", "versions.json"])
def test_a_linked_file_is_not_read(tmp_path, name):
    out = write_run(tmp_path / "out", method={"type": "secret"})
    run = write_run(tmp_path / "in" / "one")
    os.remove(run / name)
    (run / name).symlink_to(out / name)
    shelf = shelf_of(tmp_path / "in")
    told = repr(shelf.summaries()) + repr(shelf.config("one"))
    assert "secret" not in told
    if name == "events.jsonl":
        assert shelf.summaries()[0].done == 0
        with pytest.raises(OSError, match="symbolic"):
            shelf.fold("one").feed()


def test_a_broken_config_is_shown_as_a_run_without_words(tmp_path):
    run = write_run(tmp_path / "one")
    (run / "config.json").write_bytes(b"{")
    (one,) = shelf_of(tmp_path).summaries()
    assert (one.method, one.rounds, one.done) == ("", 0, 4)


def test_a_search_is_told_as_one(tmp_path):
    folder = tmp_path / "search"
    folder.mkdir()
    (folder / "config.json").write_text('{"network": {"name": "digits_cnn"}, "search": {}}')
    trial = '{"rates": [0.5, 0.1], "seed": 1, "accuracy": 0.25}\n'
    (folder / "trials.jsonl").write_text(trial + trial.replace("0.25", "0.75"))
    shelf = shelf_of(tmp_path)
    (one,) = shelf.summaries()
    assert one.is_search
    assert one.method == "search"
    search = shelf.fold("search")
    while search.feed():
        pass
    assert len(search) == 2
    ((cost, gain),) = search.shown()["front"]
    assert (cost, gain) == (pytest.approx(0.7), 0.5)
