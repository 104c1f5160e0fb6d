"""The totals of a run's rounds, summed again from the JSON on disk without pliant's own sums."""

import json
from collections import Counter

import pytest

SUMS = ("samples", "steps", "macs", "useful", "available", "down", "up", "joules")
EXCHANGE_SUMS = ("forward", "server", "uplinks", "dense", "nonzero", "relayed", "waited")


def check_totals(folder):
    """Compare every round's totals with its tasks; return the number of rounds."""
    tasks, rounds = [], 0
    for line in (folder / "events.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record.get("type") == "task":
            tasks.append(record)
        elif record.get("type") == "round":
            check_round(record, tasks)
            tasks, rounds = [], rounds + 1
    return rounds


def check_round(record, tasks):
    merged = [task for task in tasks if task["outcome"] in ("finished", "partial")]
    losses = [task["loss"] for task in merged if task["loss"] is not None]
    outcomes = Counter(task["outcome"].split(":")[0] for task in tasks)
    assert (record["tasks"], record["merged"]) == (len(tasks), len(merged))
    assert record["outcomes"] == outcomes
    for name in SUMS:
        assert record[name] == pytest.approx(sum(task[name] for task in tasks), rel=1e-12), name
    assert record["busy"] == pytest.approx(sum(task["seconds"] for task in tasks), rel=1e-12)
    mean = pytest.approx(sum(losses) / len(losses), rel=1e-12) if losses else None
    assert record["loss"] == mean
    exchanges = [task["exchange"] for task in tasks if task["exchange"] is not None]
    assert (record["exchange"] is None) == (exchanges == [])
    for name in EXCHANGE_SUMS if exchanges else ():
        total = sum(exchange[name] for exchange in exchanges)
        assert record["exchange"][name] == pytest.approx(total, rel=1e-12), name
    refused = sum((Counter(exchange["refused"]) for exchange in exchanges), Counter())
    assert not exchanges or record["exchange"]["refused"] == refused
