"""Replay recorded device speeds: see what each device trained, and which were late."""

import tempfile
from pathlib import Path

import pliant as pl

RECORDING = """device,seconds,speed
phone,0.0,1.0
phone,0.4,0.3
phone,1.5,1.0
camera,0.0,0.5
gateway,0.0,0.8
gateway,0.7,0.1
gateway,0.9,0.8
"""

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder, "speeds.csv")
    path.write_text(RECORDING)
    fleet = pl.Fleet(size=3, speed=pl.RecordedTrace(str(path), period=2.0))
    data = pl.data.digits().share(pl.Iid(), devices=3, proxy=7000)
    settings = pl.RunSettings(rounds=2, per_round=3, rules=pl.RoundRules(late="discard"))
    run = Path(folder, "run")
    net = pl.models.digits_cnn(classes=10)
    for record in pl.simulate(pl.Distreal(), net, data, fleet, settings=settings, folder=run):
        print(
            f"round {record.round}: {record.outcomes}, {record.utilisation:.0%} of the compute used"
        )
    for record in pl.read_records(run):
        if isinstance(record, pl.TaskRecord):
            rows = " ".join(str(row) for row in record.rows)
            print(f"device {record.device}, round {record.round}: {record.outcome}; rows {rows}")
