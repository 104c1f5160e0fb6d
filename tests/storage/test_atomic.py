import os
import signal
import stat
import subprocess
import sys

import pytest
from tests.waiting import LIMIT

from pliant.storage import atomic

WRITER = """
import sys
from pathlib import Path
from pliant.storage import atomic

with atomic.replace_file(Path(sys.argv[1])) as file:
    file.write(b"new" * 100_000)
    file.flush()
    print("half way", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    return path


def test_the_new_bytes_take_the_place_of_the_old(path):
    atomic.write_bytes(path, b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(path.parent) == ["file"]


def test_folders_are_made_on_the_way(tmp_path):
    atomic.write_bytes(tmp_path / "a" / "b" / "file", b"new")
    assert (tmp_path / "a" / "b" / "file").read_bytes() == b"new"


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_in_the_middle_leaves_the_old_file_and_nothing_else(path, error):
    def write_half():
        with atomic.replace_file(path) as file:
            file.write(b"half")
            raise error

    with pytest.raises(error):
        write_half()
    assert path.read_bytes() == b"old"
    assert os.listdir(path.parent) == ["file"]


def test_the_old_file_stands_until_the_block_ends(path):
    with atomic.replace_file(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"


def test_bytes_are_on_disk_before_the_rename_and_the_rename_after(path, monkeypatch):
    done = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(handle):
        is_folder = stat.S_ISDIR(os.fstat(handle).st_mode)
        done.append("sync folder" if is_folder else "sync file")
        fsync(handle)

    def noted_replace(source, target):
        done.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    atomic.write_bytes(path, b"new")
    assert done == ["sync file", "rename", "sync folder"]


def test_a_full_disk_leaves_the_old_file_and_nothing_else(path, monkeypatch):
    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        atomic.write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(path.parent) == ["file"]


def test_a_kill_in_the_middle_leaves_the_old_file(path):
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with writer:
        assert writer.stdout.readline() == b"half way\n"
        writer.send_signal(signal.SIGKILL)
        assert writer.wait(LIMIT) == -signal.SIGKILL
    assert path.read_bytes() == b"old"
    atomic.write_bytes(path, b"new")
    assert path.read_bytes() == b"new"


@pytest.mark.skipif(os.name == "nt", reason="rights of POSIX")
def test_a_file_gets_the_rights_of_a_new_file(path):
    plain = path.with_name("plain")
    plain.touch()
    atomic.write_bytes(path, b"new")
    assert path.stat().st_mode == plain.stat().st_mode
