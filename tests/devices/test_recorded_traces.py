import pytest

from pliant.devices import Fleet, RecordedAvailability, RecordedTrace
from pliant.devices.recorded_traces import read_speeds, read_stamp, read_windows


def make_device(speed, index=0):
    return Fleet(size=10, speed=speed).device(index)


def test_a_device_replays_the_recording_of_its_number(tmp_path):
    file = tmp_path / "two.csv"
    file.write_text("device,seconds,speed\na,100,1.0\na,102,0.5\nb,101,0.25\n")
    speed = RecordedTrace(path=str(file))
    assert [make_device(speed, index).work(0.0, 4.0) for index in range(4)] == [3.0, 1.0, 3.0, 1.0]
    repeated = RecordedTrace(path=str(file), period=4.0)
    assert make_device(repeated).work(0.0, 8.0) == 6.0


def test_a_device_is_on_between_active_and_inactive(tmp_path):
    file = tmp_path / "behaviour.json"
    file.write_text(
        '{"7": {"duration": 3, "active": [1, 5], "inactive": [3, 6], "finish_time": 8,'
        ' "model": "x"},'
        ' "9": {"duration": 0, "active": [], "inactive": [], "finish_time": 8}}'
    )
    device = make_device(RecordedAvailability(path=str(file)))
    speeds = [device.speed(time) for time in (0.0, 1.0, 2.9, 3.0, 5.5, 6.0, 9.5)]
    assert speeds == [0, 1, 1, 0, 1, 0, 1]
    assert device.work(0.0, 16.0) == 6.0
    assert make_device(RecordedAvailability(path=str(file)), 1).work(0.0, 16.0) == 0.0


def write_and_read(tmp_path, name, text):
    file = tmp_path / name
    file.write_text(text)
    return read_speeds(str(file), None, read_stamp(str(file)))


def test_csv_and_json_lines_give_the_same_patterns(tmp_path):
    table = write_and_read(tmp_path, "a.csv", "seconds,speed\n5,1.0\n6.5,0.5\n")
    lines = write_and_read(
        tmp_path, "a.jsonl", '{"seconds": 5, "speed": 1.0}\n\n{"seconds": 6.5, "speed": 0.5}\n'
    )
    for patterns in (table, lines):
        assert [pattern.times.tolist() for pattern in patterns] == [[0.0, 1.5]]
        assert [pattern.levels.tolist() for pattern in patterns] == [[1.0, 0.5]]


def test_a_changed_file_is_read_again(tmp_path):
    assert write_and_read(tmp_path, "a.csv", "seconds,speed\n0,1\n")[0].levels.tolist() == [1.0]
    assert write_and_read(tmp_path, "a.csv", "seconds,speed\n0,0.5\n")[0].levels.tolist() == [0.5]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "", r"a.csv, line 1: expected the header `seconds,speed`"),
        ("a.csv", "time,speed\n0,1\n", r"a.csv, line 1: expected the header .* got 'time,speed'"),
        ("a.csv", "seconds,speed\n", "a.csv: expected at least one line"),
        ("a.csv", "seconds,speed\n0,1\n1,fast\n", r"a.csv, line 3: Expected `float`.*fast"),
        ("a.csv", "seconds,speed\n0\n", r"a.csv, line 2: Expected `float`"),
        (
            "a.csv",
            "seconds,speed\n0,-1\n",
            "a.csv, line 2: expected a finite `speed` >= 0, got -1.0",
        ),
        ("a.csv", "seconds,speed\n0,nan\n", "a.csv, line 2: expected a finite `speed`"),
        ("a.csv", "seconds,speed\ninf,1\n", "a.csv, line 2: expected finite `seconds`"),
        ("a.csv", "seconds,speed\n1,1\n1,1\n", "line 3: expected `seconds` above 1.0 .* got 1.0"),
        ("a.jsonl", "{", "a.jsonl, line 1: expected JSON"),
        ("a.jsonl", '{"seconds": 0, "speed": "1"}', "a.jsonl, line 1: Expected `float`, got `str`"),
        ("a.jsonl", '{"seconds": 0, "spead": 1}', r"a.jsonl, line 1: .*spead"),
    ],
)
def test_a_wrong_recording_is_rejected_with_its_line(tmp_path, name, text, message):
    with pytest.raises(ValueError, match=message):
        write_and_read(tmp_path, name, text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "b.json: expected at least one device"),
        ("[", "b.json: Input data was truncated"),
        ('[{"active": [1], "inactive": [2]}]', "missing required field `finish_time`"),
        ('{"4": {"active": [1], "inactive": [], "finish_time": 9}}', r"device 4: expected as many"),
        (
            '[{"active": [3], "inactive": [2], "finish_time": 9}]',
            "device 0: expected windows in order",
        ),
        (
            '[{"active": [], "inactive": [], "finish_time": 0}]',
            "expected a period above 0, got 0.0",
        ),
    ],
)
def test_a_wrong_availability_file_is_rejected(tmp_path, text, message):
    file = tmp_path / "b.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_windows(str(file), read_stamp(str(file)))


def test_a_missing_file_or_a_short_period_is_rejected(tmp_path):
    with pytest.raises(
        ValueError, match=r"none.csv: expected a readable recording, got No such file"
    ):
        read_stamp(str(tmp_path / "none.csv"))
    file = tmp_path / "a.csv"
    file.write_text("seconds,speed\n0,1\n5,1\n")
    with pytest.raises(ValueError, match=r"a.csv: expected a period above 5.0 .* got 5.0"):
        read_speeds(str(file), 5.0, read_stamp(str(file)))
