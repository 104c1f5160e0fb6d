import json
import subprocess

import pytest

from pliant.storage import run_dir
from pliant.storage.formats import UnsupportedFormat
from pliant.storage.run_dir import (
    collect_versions,
    create_run_dir,
    read_config,
    remove_unused,
)


def test_a_run_folder_holds_the_config_and_the_versions(tmp_path):
    create_run_dir(tmp_path / "run", {"rounds": 3})
    assert read_config(tmp_path / "run") == {"rounds": 3}
    versions = json.loads((tmp_path / "run" / "versions.json").read_text())
    assert {"python", "platform", "pliant", "torch", "numpy"} <= set(versions)
    assert versions["torch threads"] == "1"


def test_a_used_run_folder_is_refused_and_left_alone(tmp_path):
    create_run_dir(tmp_path, {"rounds": 3})
    with pytest.raises(FileExistsError, match="already holds a run"):
        create_run_dir(tmp_path, {"rounds": 4})
    assert read_config(tmp_path) == {"rounds": 3}


def fail_after(folder, *lines):
    """Write a run folder with these lines of records, then fail."""

    def start_run():
        with remove_unused(folder):
            create_run_dir(folder, {"rounds": 3})
            (folder / "events.jsonl").write_text("".join(f"{line}\n" for line in lines))
            raise ValueError("refused")

    with pytest.raises(ValueError, match="refused"):
        start_run()


def test_a_refused_run_leaves_neither_its_folder_nor_new_ones_above(tmp_path):
    fail_after(tmp_path / "runs" / "new", "header")
    assert list(tmp_path.iterdir()) == []


def test_records_and_folders_that_were_there_before_are_kept(tmp_path):
    fail_after(tmp_path / "runs" / "recorded", "header", "a round")
    assert read_config(tmp_path / "runs" / "recorded") == {"rounds": 3}
    (tmp_path / "own").mkdir()
    fail_after(tmp_path / "own", "header")
    assert read_config(tmp_path / "own") == {"rounds": 3}


def test_the_commit_is_the_packages_own_and_never_the_users(tmp_path):
    user = tmp_path / "user"
    for package in (user / ".venv/lib/python3/site-packages/pliant", user / "src" / "pliant"):
        package.mkdir(parents=True)
    git = ("git", "-C", str(user), "-c", "user.name=a", "-c", "user.email=a@b.c")
    for arguments in (("init", "-q"), ("commit", "-q", "--allow-empty", "-m", "first")):
        subprocess.run((*git, *arguments), check=True)
    head = subprocess.run((*git, "rev-parse", "HEAD"), check=True, capture_output=True, text=True)
    assert run_dir._find_commit(user / ".venv/lib/python3/site-packages/pliant") is None
    assert run_dir._find_commit(user / "src" / "pliant") == head.stdout.strip()


def test_versions_need_no_git(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert "commit" not in collect_versions()


def test_a_library_that_is_not_installed_has_no_version(monkeypatch):
    monkeypatch.setattr(run_dir, "LIBRARIES", ("numpy", "no-such-library"))
    assert "numpy" in collect_versions()
    assert "no-such-library" not in collect_versions()


@pytest.mark.parametrize(("number", "maker"), [(1, "an older"), (3, "a newer")])
def test_a_config_of_another_format_is_refused(tmp_path, number, maker):
    (tmp_path / "config.json").write_text(json.dumps({"format": number, "rounds": 3}))
    with pytest.raises(UnsupportedFormat, match=f"got format {number} of {maker} pliant"):
        read_config(tmp_path)
