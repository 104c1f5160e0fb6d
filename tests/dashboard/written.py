"""Runs as pliant writes them, made quickly: real records, invented numbers."""

import json

import msgspec

from pliant.engine.evaluate import Score
from pliant.engine.ledger import TaskRecord, summed


def config(**changes):
    """Return a config as a run has it."""
    found = {
        "method": {"type": "distreal"},
        "network": {"name": "digits_cnn"},
        "data": {"name": "digits"},
        "rounds": 4,
        "seed": 0,
    }
    return found | changes


def task(number, device, end="finished", steps=4):
    """Return the record of one task: mini-batches of 0.2 s, rising rows."""
    starts = tuple(0.2 * at for at in range(steps))
    return TaskRecord(
        round=number, device=device, end=end, samples=8 * steps, steps=steps, macs=100.0 * steps,
        useful=100.0 * steps, available=500.0, down=1000, up=1000, seconds=0.2 * steps, joules=0.0,
        loss=1.0, starts=starts, ends=tuple(at + 0.2 for at in starts), rows=tuple(range(steps)),
    )  # fmt: skip


def lines(number, tasks=2, steps=4, is_scored=True, accuracy=None):
    """Return the lines of one round."""
    records = [task(number, device, steps=steps) for device in range(tasks)]
    total = summed(number, float(number + 1), records)
    value = 1 - 0.9 / (number + 1) if accuracy is None else accuracy
    if is_scored:
        total = msgspec.structs.replace(total, score=Score(value, 0.5, (value,)))
    return b"".join(msgspec.json.encode(record) + b"\n" for record in [*records, total])


def write_run(folder, done=4, **changes):
    """Write a run of so many rounds and return its folder."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config(**changes)))
    (folder / "versions.json").write_text(json.dumps({"command": "pliant run x.toml"}))
    (folder / "events.jsonl").write_bytes(b"".join(lines(number) for number in range(done)))
    return folder
