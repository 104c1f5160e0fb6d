"""A followed file gives each whole line once, whatever happens to it in between."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.dashboard.tail import Tail, read_part

line = st.binary(max_size=40).map(lambda text: text.replace(b"\n", b"") + b"\n")


@given(parts=st.lists(st.lists(line, max_size=5), max_size=5), most=st.integers(1, 50))
def test_all_looks_together_are_the_file(parts, most, tmp_path_factory):
    path = tmp_path_factory.mktemp("tail") / "events.jsonl"
    tail, got, written = Tail(path), b"", b""
    for part in parts:
        with open(path, "ab") as file:
            file.write(b"".join(part))
        written += b"".join(part)
        while True:
            is_cut, text = tail.look(most)
            assert not is_cut
            if not text:
                break
            assert text.endswith(b"\n")
            got += text
    assert got == written


def test_a_line_without_its_end_waits(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"one\ntw")
    tail = Tail(path)
    assert tail.look() == (False, b"one\n")
    assert tail.look() == (False, b"")
    with open(path, "ab") as file:
        file.write(b"o\n")
    assert tail.look() == (False, b"two\n")


def test_a_file_that_was_cut_back_is_read_anew(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"one\ntwo\nthree\n")
    tail = Tail(path)
    tail.look()
    os.truncate(path, 4)
    assert tail.look() == (True, b"one\n")


def test_a_file_that_was_cut_back_and_has_outgrown_itself_is_read_anew(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"one\ntwo\n")
    tail = Tail(path)
    tail.look()
    path.write_bytes(b"one\nother\nmore\n")
    assert tail.look() == (True, b"one\nother\nmore\n")


def test_what_was_read_is_not_read_again(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"x" * 1000 + b"\n")
    tail = Tail(path)
    tail.look()
    with open(path, "r+b") as file:  # unseen: only the last bytes before the place are compared
        file.write(b"y" * 900)
    assert tail.look() == (False, b"")


def test_a_file_that_is_not_there_yet_is_empty(tmp_path):
    assert Tail(tmp_path / "events.jsonl").look() == (False, b"")


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "secret").write_bytes(b"secret\n")
    (tmp_path / "events.jsonl").symlink_to(tmp_path / "secret")
    with pytest.raises(OSError, match="symbolic"):
        Tail(tmp_path / "events.jsonl").look()
    with pytest.raises(OSError, match="symbolic"):
        read_part(tmp_path / "events.jsonl", 0, 10)
