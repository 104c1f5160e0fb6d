import json

import pytest

from pliant import cli
from pliant.cli import bench_engine
from pliant.cli.bench_engine import Measured


def test_a_limit_is_met_up_to_itself():
    assert Measured("rounds", 5.0, "ms", 5.0).is_met
    assert not Measured("rounds", 5.01, "ms", 5.0).is_met
    assert Measured("rounds", 99.0).is_met


@pytest.mark.parametrize(("value", "code"), [(4.0, 0), (6.0, 1)])
def test_the_exit_code_tells_whether_all_limits_are_met(value, code, monkeypatch, capsys):
    found = [Measured("a round", value, "ms", 5.0), Measured("a ratio", 9.0)]
    monkeypatch.setattr(bench_engine, "measure", lambda: iter(found))
    assert cli.main(["bench", "engine"]) == code
    first, second = capsys.readouterr().out.splitlines()
    assert "(limit 5)" in first
    assert first.endswith("MISSED") == bool(code)
    assert "limit" not in second
    assert cli.main(["bench", "engine", "--json"]) == code
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["is_met"] for line in lines] == [not code, True]


def test_empty_rounds_and_timetables_are_measured():
    found = [*bench_engine.empty_rounds(seconds=0.1), *bench_engine.timetables(seconds=0.1)]
    assert len(found) == 5
    assert all(0 < each.value < 1000 for each in found)


def test_every_device_of_an_empty_round_sends_its_update():
    first = next(
        records := bench_engine.running(bench_engine.Nothing(), bench_engine.tiny, rounds=2)
    )
    records.close()
    assert first.ends == {"finished": 10}
