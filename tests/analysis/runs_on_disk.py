"""Runs as pliant writes them, small enough to check by hand."""

import json

import msgspec

from pliant.engine.evaluation import Score
from pliant.engine.ledger import TaskRecord, sum_tasks
from pliant.storage import formats
from pliant.storage.jsonl import JsonlHeader


def make_task(number, device, outcome="finished"):
    """Return a task of two mini-batches: 100 MACs of 200, all useful unless it was late."""
    is_late = outcome == "late"
    return TaskRecord(
        round=number,
        device=device,
        outcome=outcome,
        samples=0 if is_late else 8,
        steps=0 if is_late else 2,
        macs=100.0,
        useful=0.0 if is_late else 100.0,
        available=200.0,
        down=1000,
        up=500,
        joules=0.0,
        seconds=0.8,
        loss=None if is_late else 1.0,
        starts=(0.0, 0.4),
        ends=(0.4,) if is_late else (0.4, 0.8),
        rows=(1, 0),
    )


def write_run(folder, accuracies, *, late=(), on_devices=None, **config):
    """Write a run with these accuracies by round; None is a round without an evaluation."""
    folder.mkdir(parents=True)
    config = {"method": {"type": "fedavg"}, "rounds": len(accuracies), "seed": 0} | config
    config["format"] = formats.RUN_CONFIG.number
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "versions.json").write_text(json.dumps({"command": "pliant run <x>.toml"}))
    with open(folder / "events.jsonl", "wb") as file:
        file.write(msgspec.json.encode(JsonlHeader(formats.RECORDS.number)) + b"\n")
        for number, accuracy in enumerate(accuracies):
            tasks = [
                make_task(number, device, "late" if (number, device) in late else "finished")
                for device in (4, 7)
            ]
            total = sum_tasks(number, float(number + 1), tasks)
            total = msgspec.structs.replace(total, on_devices=on_devices)
            if accuracy is not None:
                total = msgspec.structs.replace(total, score=Score(accuracy, 0.5, (accuracy,)))
            for record in [*tasks, total]:
                file.write(msgspec.json.encode(record) + b"\n")
    return folder
