import json

import pytest

from pliant import cli
from pliant.bench import engine
from pliant.bench.timing import Measurement


def test_a_value_at_its_limit_meets_it():
    assert Measurement("rounds", 5.0, "ms", 5.0).is_met
    assert not Measurement("rounds", 5.01, "ms", 5.0).is_met
    assert Measurement("rounds", 99.0).is_met


@pytest.mark.parametrize(("value", "code"), [(4.0, 0), (6.0, 1)])
def test_the_exit_code_says_whether_all_limits_are_met(value, code, monkeypatch, capsys):
    results = [Measurement("a round", value, "ms", 5.0), Measurement("a ratio", 9.0)]
    monkeypatch.setattr(engine, "measure", lambda: iter(results))
    assert cli.main(["bench", "engine"]) == code
    first, second = capsys.readouterr().out.splitlines()
    assert "(limit 5)" in first
    assert first.endswith("MISSED") == bool(code)
    assert "limit" not in second
    assert cli.main(["bench", "engine", "--json"]) == code
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["is_met"] for line in lines] == [not code, True]


@pytest.mark.slow
def test_empty_rounds_and_timetables_are_measured():
    results = [
        *engine.measure_empty_rounds(seconds=0.1),
        *engine.measure_timetable(seconds=0.1),
        *engine.measure_schedules(size=40, seconds=0.1),
    ]
    assert len(results) == 8
    assert all(result.value > 0 for result in results)


@pytest.mark.slow
def test_the_memory_of_a_round_does_not_grow_with_its_devices():
    results = [*engine.measure_large_rounds(few=10, many=40)]
    assert len(results) == 2
    assert all(result.is_met for result in results)


def test_every_device_of_an_empty_round_sends_its_update():
    first = next(records := engine.run_rounds(engine.NoTraining(), engine.make_tiny, rounds=2))
    records.close()
    assert first.outcomes == {"finished": 10}
