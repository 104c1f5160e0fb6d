import json
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct

from pliant import record
from pliant.record import Records, begin, read, versions, whole_size


class Line(Struct):
    round: int
    text: str = ""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "events.jsonl"


def rounds(path):
    return [line.round for line in read(path, Line)]


def test_records_are_lines_and_come_back_in_order(path):
    with Records(path) as records:
        for number in range(3):
            records.append(Line(number, "a\nb"))
    assert path.read_bytes().count(b"\n") == 3
    assert list(read(path, Line)) == [Line(number, "a\nb") for number in range(3)]


def test_a_record_can_be_read_before_the_file_is_closed(path):
    with Records(path) as records:
        records.append(Line(1))
        assert rounds(path) == [1]


def test_opening_again_goes_on_at_the_end(path):
    for number in range(3):
        with Records(path) as records:
            records.append(Line(number))
    assert rounds(path) == [0, 1, 2]


def test_a_line_cut_at_any_byte_is_cut_off_on_opening(path):
    with Records(path) as records:
        records.append(Line(1))
        whole = records.position()
        records.append(Line(2))
    raw = path.read_bytes()
    for cut in range(whole, len(raw)):
        path.write_bytes(raw[:cut])
        assert rounds(path) == [1]
        with Records(path) as records:
            assert records.position() == whole
            records.append(Line(3))
        assert rounds(path) == [1, 3]


def test_a_file_that_is_one_torn_line_becomes_empty(path):
    path.parent.mkdir()
    path.write_bytes(b"x" * 200_000)
    with Records(path) as records:
        assert records.position() == 0


@given(st.binary(max_size=30).map(lambda raw: raw.replace(b"x", b"\n")))
def test_the_whole_part_ends_with_the_last_line(tmp_path_factory, raw):
    path = tmp_path_factory.mktemp("whole") / "file"
    path.write_bytes(raw)
    assert whole_size(path) == len(raw) - len(raw.split(b"\n")[-1])


def test_the_whole_part_is_found_behind_a_long_torn_line(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"{}\n" + b"x" * 200_000)
    assert whole_size(path) == 3
    assert whole_size(tmp_path / "none") == 0


def test_rewinding_forgets_what_came_after(path):
    with Records(path) as records:
        records.append(Line(1))
        position = records.position()
        records.append(Line(2))
        records.rewind(position)
        records.append(Line(3))
    assert rounds(path) == [1, 3]


def test_rewinding_past_the_end_is_refused(path):
    with Records(path) as records, pytest.raises(ValueError, match=r"events.jsonl: expected at le"):
        records.rewind(1)


def test_a_wrong_line_is_named(path):
    path.parent.mkdir()
    path.write_bytes(b'{"round": 1}\n{"round": "two"}\n')
    with pytest.raises(ValueError, match=r"events.jsonl:2: Expected `int`, got `str`"):
        list(read(path, Line))


def test_a_run_folder_says_what_was_asked_and_what_it_runs_on(tmp_path):
    begin(tmp_path / "run", {"rounds": 3})
    assert json.loads((tmp_path / "run" / "config.json").read_text()) == {"rounds": 3}
    found = json.loads((tmp_path / "run" / "versions.json").read_text())
    assert {"python", "platform", "pliant", "torch", "numpy"} <= set(found)
    assert found["torch threads"] == "1"


def test_a_used_run_folder_is_refused_and_left_alone(tmp_path):
    begin(tmp_path, {"rounds": 3})
    with pytest.raises(FileExistsError, match="holds a run already"):
        begin(tmp_path, {"rounds": 4})
    assert json.loads((tmp_path / "config.json").read_text()) == {"rounds": 3}


def test_the_commit_is_the_package_s_own_and_never_the_user_s(tmp_path):
    user = tmp_path / "user"
    for package in (user / ".venv/lib/python3/site-packages/pliant", user / "src" / "pliant"):
        package.mkdir(parents=True)
    git = ("git", "-C", str(user), "-c", "user.name=a", "-c", "user.email=a@b.c")
    for arguments in (("init", "-q"), ("commit", "-q", "--allow-empty", "-m", "first")):
        subprocess.run((*git, *arguments), check=True)
    asked = subprocess.run((*git, "rev-parse", "HEAD"), check=True, capture_output=True, text=True)
    assert record._commit(user / ".venv/lib/python3/site-packages/pliant") is None
    assert record._commit(user / "src" / "pliant") == asked.stdout.strip()


def test_versions_need_no_git(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert "commit" not in versions()


def test_a_library_that_is_not_installed_has_no_version(monkeypatch):
    monkeypatch.setattr(record, "LIBRARIES", ("numpy", "no-such-library"))
    assert "numpy" in versions()
    assert "no-such-library" not in versions()
