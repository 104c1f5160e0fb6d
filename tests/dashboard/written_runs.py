"""Runs as pliant writes them, made quickly: real records, invented numbers."""

import json

import msgspec

from pliant.deploy.server.presence import PresenceWriter
from pliant.engine.evaluation import Score
from pliant.engine.ledger import TaskRecord, sum_tasks
from pliant.storage import formats
from pliant.storage.jsonl import JsonlHeader

HEADER_LINE = msgspec.json.encode(JsonlHeader(formats.RECORDS.number)) + b"\n"


def make_config(**changes):
    """Return the config of a run as plain data."""
    config = {
        "format": formats.RUN_CONFIG.number,
        "method": {"type": "distreal"},
        "network": {"name": "digits_cnn"},
        "data": {"name": "digits"},
        "rounds": 4,
        "seed": 0,
    }
    return config | changes


def make_task(number, device, steps=4):
    """Return the record of one task: mini-batches of 0.2 s, rising rows."""
    starts = tuple(0.2 * step for step in range(steps))
    return TaskRecord(
        round=number, device=device, outcome="finished", samples=8 * steps, steps=steps,
        macs=100.0 * steps, useful=100.0 * steps, available=500.0, down=1000, up=1000,
        seconds=0.2 * steps, joules=0.0, loss=1.0, starts=starts,
        ends=tuple(start + 0.2 for start in starts), rows=tuple(range(steps)),
    )  # fmt: skip


def make_lines(number, tasks=2, steps=4, is_scored=True, accuracy=None):
    """Return the lines of one round."""
    records = [make_task(number, device, steps) for device in range(tasks)]
    total = sum_tasks(number, float(number + 1), records)
    value = 1 - 0.9 / (number + 1) if accuracy is None else accuracy
    if is_scored:
        total = msgspec.structs.replace(total, score=Score(value, 0.5, (value,)))
    return b"".join(msgspec.json.encode(record) + b"\n" for record in [*records, total])


def write_run(folder, done=4, *, lower=0.0, **changes):
    """Write a run with `done` rounds and return its folder; `lower` is taken off accuracies."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(make_config(**changes)))
    (folder / "versions.json").write_text(json.dumps({"command": "pliant run x.toml"}))
    accuracies = [1 - 0.9 / (number + 1) - lower for number in range(done)]
    rounds = b"".join(make_lines(n, accuracy=value) for n, value in enumerate(accuracies))
    (folder / "events.jsonl").write_bytes(HEADER_LINE + rounds)
    return folder


def make_writer(folder):
    """Return what notes the devices of a run, and writes its first note at once."""
    return PresenceWriter(folder, shares=(0.1, 0.25, 0.5, 1.0))
