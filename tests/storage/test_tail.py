"""A followed file yields each complete line once, even if it is truncated in between."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.storage.tail import FileTail, read_range

line = st.binary(max_size=40).map(lambda text: text.replace(b"\n", b"") + b"\n")


@given(parts=st.lists(st.lists(line, max_size=5), max_size=5), max_bytes=st.integers(1, 50))
def test_all_reads_together_yield_the_file(parts, max_bytes, tmp_path_factory):
    path = tmp_path_factory.mktemp("tail") / "events.jsonl"
    tail, read, written = FileTail(path), b"", b""
    for part in parts:
        with open(path, "ab") as file:
            file.write(b"".join(part))
        written += b"".join(part)
        while True:
            is_cut, text = tail.read_new_lines(max_bytes)
            assert not is_cut
            if not text:
                break
            assert text.endswith(b"\n")
            read += text
    assert read == written


def test_an_unfinished_line_is_not_read_yet(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"one\ntw")
    tail = FileTail(path)
    assert tail.read_new_lines() == (False, b"one\n")
    assert tail.read_new_lines() == (False, b"")
    with open(path, "ab") as file:
        file.write(b"o\n")
    assert tail.read_new_lines() == (False, b"two\n")


def test_a_truncated_file_is_read_again(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"one\ntwo\nthree\n")
    tail = FileTail(path)
    tail.read_new_lines()
    os.truncate(path, 4)
    assert tail.read_new_lines() == (True, b"one\n")


def test_a_truncated_file_that_has_grown_since_is_read_again(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"one\ntwo\n")
    tail = FileTail(path)
    tail.read_new_lines()
    path.write_bytes(b"one\nother\nmore\n")
    assert tail.read_new_lines() == (True, b"one\nother\nmore\n")


def test_only_the_last_line_is_compared(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"one\n" + b"x" * 1000 + b"\n")
    tail = FileTail(path)
    tail.read_new_lines()
    with open(path, "r+b") as file:
        file.write(b"two")
        file.flush()
        assert tail.read_new_lines() == (False, b"")
        file.seek(4)
        file.write(b"y")
    assert tail.read_new_lines() == (True, b"two\ny" + b"x" * 999 + b"\n")


def test_a_missing_file_is_empty(tmp_path):
    assert FileTail(tmp_path / "events.jsonl").read_new_lines() == (False, b"")


def test_a_symbolic_link_is_not_followed(tmp_path):
    (tmp_path / "secret").write_bytes(b"secret\n")
    (tmp_path / "events.jsonl").symlink_to(tmp_path / "secret")
    with pytest.raises(OSError, match="symbolic"):
        FileTail(tmp_path / "events.jsonl").read_new_lines()
    with pytest.raises(OSError, match="symbolic"):
        read_range(tmp_path / "events.jsonl", 0, 10)
