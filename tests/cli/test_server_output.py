"""What `pliant server` prints about rounds."""

from contextlib import closing

from pliant.cli.server import format_rounds
from pliant.engine.ledger import TaskRecord, sum_tasks
from pliant.storage.formats import RECORDS
from pliant.storage.jsonl import JsonlWriter


def make_task(round_number, device, outcome):
    done = int(outcome == "finished")
    return TaskRecord(round_number, device, outcome, done, done, done, done, 1.0, 9, 9, 1.0, 0.0)


def format_outcomes(folder, *outcomes, is_retried=True):
    """Write rounds whose tasks ended this way, and return the printed lines."""
    tasks = [
        [make_task(number, device, outcome) for device, outcome in enumerate(round_outcomes)]
        for number, round_outcomes in enumerate(outcomes)
    ]
    rounds = [
        sum_tasks(number, number + 1.0, round_tasks) for number, round_tasks in enumerate(tasks)
    ]
    with closing(JsonlWriter(folder / "events.jsonl", RECORDS)) as records:
        for round_tasks, total in zip(tasks, rounds, strict=True):
            for record in (*round_tasks, total):
                records.append(record)
    return list(format_rounds(rounds, folder, rounds=3, is_retried=is_retried))


def test_a_round_without_updates_is_reported_and_not_counted(tmp_path):
    good, bad = ["finished"], ["dropped: failed, ValueError: no data"]
    lines = format_outcomes(tmp_path, good, bad, good, bad, bad, good)
    assert [line.split()[1] for line in lines] == ["1/3", "2/3", "2/3", "3/3", "3/3", "3/3"]
    assert lines[1] == (
        "round   2/3 merged no update (1 dropped: failed, ValueError: no data); "
        "retrying from the same network\n"
    )


def test_a_reason_is_printed_once(tmp_path):
    bad = "dropped: declined, it is not charging"
    odd = "rejected: device 2: expected\nfinite numbers"
    lines = format_outcomes(tmp_path, ["finished", bad, "late"], ["finished", bad, odd])
    assert lines[1] == f"    {bad}\n"
    assert lines[3] == "    rejected: device 2: expected finite numbers\n"
    assert [line.startswith("round") for line in lines] == [True, False, True, False]
    assert "1 dropped, 1 finished, 1 late" in lines[0]


def test_outcomes_are_counted_by_their_reasons(tmp_path):
    [line] = format_outcomes(tmp_path, ["late", "dropped: it left", "late"])
    assert "merged no update (2 late; 1 dropped: it left); retrying" in line


def test_a_split_round_is_not_retried(tmp_path):
    lines = format_outcomes(tmp_path, ["dropped"], ["finished"], ["finished"], is_retried=False)
    assert lines[0] == "round   1/3 merged no update (1 dropped)\n"
    assert [line.split()[1] for line in lines] == ["1/3", "2/3", "3/3"]
