from collections import namedtuple
from pathlib import Path

import pytest

from pliant.workers import shared_memory
from pliant.workers.shared_memory import map_shared, write_shared


def test_a_reader_sees_the_last_write_and_keeps_its_own_writes_private(tmp_path):
    path = tmp_path / "shared"
    path.touch()
    write_shared(path, [b"one", b"two"])
    first, second = map_shared(path), map_shared(path)
    assert first[:] == b"onetwo"
    first[0:1] = b"X"
    assert first[:3] == b"Xne"
    assert second[:3] == b"one"
    write_shared(path, [b"new"])
    assert second[:] == map_shared(path)[:] == b"newtwo"
    write_shared(path, [b"longer", b"!"])
    assert second[:] == b"longer"
    assert map_shared(path)[:] == b"longer!"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_an_error_and_not_a_crash():
    with pytest.raises(OSError, match="No space left"):
        write_shared(Path("/dev/full"), [bytes(100_000)])


def test_a_small_memory_folder_is_not_used(tmp_path, monkeypatch):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shared_memory, "SHM_FOLDER", tmp_path)
    monkeypatch.setattr(shared_memory.shutil, "disk_usage", lambda _: usage(2**40))
    assert shared_memory.choose_memory_folder() == tmp_path
    monkeypatch.setattr(shared_memory.shutil, "disk_usage", lambda _: usage(64 * 2**20))
    assert shared_memory.choose_memory_folder() != tmp_path
    monkeypatch.setattr(shared_memory, "SHM_FOLDER", tmp_path / "missing")
    assert shared_memory.choose_memory_folder() != tmp_path
