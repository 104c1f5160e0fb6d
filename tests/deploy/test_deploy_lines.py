"""What is shown of rounds on real devices."""

from pliant.cli.server import lines
from pliant.engine.ledger import TaskRecord, summed
from pliant.record import Records


def task(round, device, end):
    done = int(end == "finished")
    return TaskRecord(round, device, end, done, done, done, done, 1.0, 9, 9, 1.0, 0.0)


def told(folder, *ends, is_tried_again=True):
    """Write rounds whose tasks ended so, and return what is shown of them."""
    tasks = [[task(r, d, end) for d, end in enumerate(each)] for r, each in enumerate(ends)]
    rounds = [summed(number, number + 1.0, each) for number, each in enumerate(tasks)]
    with Records(folder / "events.jsonl") as records:
        for each, total in zip(tasks, rounds, strict=True):
            for record in (*each, total):
                records.append(record)
    return list(lines(rounds, folder, rounds=3, is_tried_again=is_tried_again))


def test_a_round_that_came_to_nothing_says_so_and_is_not_counted(tmp_path):
    good, bad = ["finished"], ["dropped: failed, ValueError: no data"]
    shown = told(tmp_path, good, bad, good, bad, bad, good)
    assert [line.split()[1] for line in shown] == ["1/3", "2/3", "2/3", "3/3", "3/3", "3/3"]
    assert shown[1] == (
        "round   2/3 came to nothing (1 dropped: failed, ValueError: no data); "
        "again from the same network\n"
    )


def test_a_reason_is_told_once(tmp_path):
    bad = "dropped: declined, it is not charging"
    odd = "rejected: device 2: expected\nfinite numbers"
    shown = told(tmp_path, ["finished", bad, "late"], ["finished", bad, odd])
    assert shown[1] == f"    {bad}\n"
    assert shown[3] == "    rejected: device 2: expected finite numbers\n"
    assert [line.startswith("round") for line in shown] == [True, False, True, False]
    assert "1 dropped, 1 finished, 1 late" in shown[0]


def test_ends_are_counted_by_their_reasons(tmp_path):
    [shown] = told(tmp_path, ["late", "dropped: it left", "late"])
    assert "came to nothing (2 late; 1 dropped: it left); again" in shown


def test_a_split_round_is_not_tried_again(tmp_path):
    shown = told(tmp_path, ["dropped"], ["finished"], ["finished"], is_tried_again=False)
    assert shown[0] == "round   1/3 came to nothing (1 dropped)\n"
    assert [line.split()[1] for line in shown] == ["1/3", "2/3", "3/3"]
