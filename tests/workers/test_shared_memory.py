import os
from collections import namedtuple

import pytest

from pliant.workers import shared_memory
from pliant.workers.shared_memory import Segment, map_segment


def test_a_reader_sees_the_last_write_and_keeps_its_own_writes_private(tmp_path):
    shared = Segment(tmp_path / "shared", 8)
    shared.write([b"one", b"two"])
    first, second = map_segment(str(shared.path)), map_segment(str(shared.path))
    assert first[:] == b"onetwo\0\0"
    first[0:1] = b"X"
    assert first[:3] == b"Xne"
    assert second[:3] == b"one"
    shared.write([b"new"])
    assert second[:6] == map_segment(str(shared.path))[:6] == b"newtwo"
    shared.close()
    assert not shared.path.exists()


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="cannot reserve disk space")
def test_a_full_disk_is_an_error_and_not_a_crash(tmp_path):
    with pytest.raises(OSError, match=r"No space left|too large"):
        Segment(tmp_path / "shared", 2**62)


def test_a_small_memory_folder_is_not_used(tmp_path, monkeypatch):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shared_memory, "SHM_FOLDER", tmp_path)
    monkeypatch.setattr(shared_memory.shutil, "disk_usage", lambda _: usage(2**40))
    assert shared_memory.choose_memory_folder() == tmp_path
    monkeypatch.setattr(shared_memory.shutil, "disk_usage", lambda _: usage(64 * 2**20))
    assert shared_memory.choose_memory_folder() != tmp_path
    monkeypatch.setattr(shared_memory, "SHM_FOLDER", tmp_path / "missing")
    assert shared_memory.choose_memory_folder() != tmp_path
