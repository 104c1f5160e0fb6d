from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct

from pliant.storage.formats import RECORDS, TRIALS, FileFormat, UnsupportedFormat
from pliant.storage.jsonl import JsonlWriter, count_complete_bytes, read_jsonl

HEADER = b'{"type":"header","format":2}\n'


class Line(Struct):
    round: int
    text: str = ""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "events.jsonl"


def rounds(path):
    return [line.round for line in read_jsonl(path, Line, RECORDS)]


def test_records_are_lines_and_come_back_in_order(path):
    with closing(JsonlWriter(path, RECORDS)) as records:
        for number in range(3):
            records.append(Line(number, "a\nb"))
    assert path.read_bytes().count(b"\n") == 4
    assert list(read_jsonl(path, Line, RECORDS)) == [Line(number, "a\nb") for number in range(3)]


def test_a_record_can_be_read_before_the_file_is_closed(path):
    with closing(JsonlWriter(path, RECORDS)) as records:
        records.append(Line(1))
        assert rounds(path) == [1]


def test_opening_again_appends_at_the_end(path):
    for number in range(3):
        with closing(JsonlWriter(path, RECORDS)) as records:
            records.append(Line(number))
    assert rounds(path) == [0, 1, 2]


def test_an_unfinished_line_is_removed_on_opening_wherever_it_was_cut(path):
    with closing(JsonlWriter(path, RECORDS)) as records:
        records.append(Line(1))
        complete = records.sync()
        records.append(Line(2))
    raw = path.read_bytes()
    for cut in range(complete, len(raw)):
        path.write_bytes(raw[:cut])
        assert rounds(path) == [1]
        with closing(JsonlWriter(path, RECORDS)) as records:
            assert records.sync() == complete
            records.append(Line(3))
        assert rounds(path) == [1, 3]


def test_a_file_with_nothing_but_an_unfinished_line_is_started_again(path):
    path.parent.mkdir()
    path.write_bytes(b"x" * 200_000)
    with closing(JsonlWriter(path, RECORDS)) as records:
        assert records.sync() == len(HEADER)


@given(st.binary(max_size=30).map(lambda raw: raw.replace(b"x", b"\n")))
def test_complete_bytes_end_with_the_last_newline(tmp_path_factory, raw):
    path = tmp_path_factory.mktemp("complete") / "file"
    path.write_bytes(raw)
    assert count_complete_bytes(path) == len(raw) - len(raw.split(b"\n")[-1])


def test_complete_bytes_are_found_before_a_long_unfinished_line(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"{}\n" + b"x" * 200_000)
    assert count_complete_bytes(path) == 3
    assert count_complete_bytes(tmp_path / "none") == 0


def test_rewinding_drops_the_records_after_a_position(path):
    with closing(JsonlWriter(path, RECORDS)) as records:
        records.append(Line(1))
        position = records.sync()
        records.append(Line(2))
        records.rewind(position)
        records.append(Line(3))
    assert rounds(path) == [1, 3]


def test_rewinding_past_the_end_is_refused(path):
    with (
        closing(JsonlWriter(path, RECORDS)) as records,
        pytest.raises(ValueError, match=r"events.jsonl: expected at le"),
    ):
        records.rewind(1_000)


def test_the_error_for_a_wrong_line_names_it(path):
    path.parent.mkdir()
    path.write_bytes(HEADER + b'{"round": 1}\n{"round": "two"}\n')
    with pytest.raises(ValueError, match=r"events.jsonl:3: Expected `int`, got `str`"):
        list(read_jsonl(path, Line, RECORDS))


def test_rewinding_to_the_start_keeps_the_header(path):
    with closing(JsonlWriter(path, RECORDS)) as records:
        records.append(Line(1))
        records.rewind(0)
        records.append(Line(2))
    assert path.read_bytes().startswith(HEADER)
    assert rounds(path) == [2]


@pytest.mark.parametrize(
    ("first_line", "number"), [(b'{"round":1}', 1), (b'{"type":"header","format":1}', 1)]
)
def test_a_file_of_an_older_format_is_refused_and_left_alone(path, first_line, number):
    raw = first_line + b'\n{"round":2}\n{"rou'
    path.parent.mkdir()
    path.write_bytes(raw)
    message = f"records of format 2, got format {number} of an older pliant; run the experiment"
    with pytest.raises(UnsupportedFormat, match=message):
        JsonlWriter(path, RECORDS)
    with pytest.raises(UnsupportedFormat, match=message):
        rounds(path)
    assert path.read_bytes() == raw


def test_a_file_of_a_newer_format_asks_for_an_upgrade(path):
    with closing(JsonlWriter(path, FileFormat("records", 3, ""))):
        pass
    with pytest.raises(UnsupportedFormat, match="got format 3 of a newer pliant; upgrade pliant"):
        rounds(path)


def test_every_kind_of_file_says_what_to_do():
    for file_format in (RECORDS, TRIALS):
        with pytest.raises(UnsupportedFormat, match=f"; {file_format.advice}$"):
            file_format.check(None, "file")
