import os
from collections import namedtuple

import pytest

from pliant.engine import segment
from pliant.engine.segment import Segment, mapped


def test_a_reader_sees_what_was_written_last_and_its_own_writing_stays_its_own(tmp_path):
    shared = Segment(tmp_path / "shared", 8)
    shared.write([b"one", b"two"])
    first, second = mapped(str(shared.path)), mapped(str(shared.path))
    assert first[:] == b"onetwo\0\0"
    first[0:1] = b"X"
    assert first[:3] == b"Xne"
    assert second[:3] == b"one"
    shared.write([b"new"])
    assert second[:6] == mapped(str(shared.path))[:6] == b"newtwo"
    shared.close()
    assert not shared.path.exists()


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="no way to ask for room here")
def test_a_full_disk_is_an_error_and_not_a_crash(tmp_path):
    with pytest.raises(OSError, match=r"No space left|too large"):
        Segment(tmp_path / "shared", 2**62)


def test_a_small_memory_folder_is_passed_over(tmp_path, monkeypatch):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(segment, "MEMORY", tmp_path)
    monkeypatch.setattr(segment.shutil, "disk_usage", lambda _: usage(2**40))
    assert segment.memory_folder() == tmp_path
    monkeypatch.setattr(segment.shutil, "disk_usage", lambda _: usage(64 * 2**20))
    assert segment.memory_folder() != tmp_path
    monkeypatch.setattr(segment, "MEMORY", tmp_path / "missing")
    assert segment.memory_folder() != tmp_path
