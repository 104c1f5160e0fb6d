"""Play a recording of real devices: who ran what when, at what rates, and who was late."""

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
    fleet = pl.Fleet(size=3, speed=pl.Recorded(str(path), period=2.0))
    data = pl.data.digits().share(pl.Iid(), devices=3, proxy=7000)
    setting = pl.Setting(rounds=2, per_round=3, rules=pl.Rules(late="discard"))
    run = Path(folder, "run")
    net = pl.models.digits_cnn(classes=10)
    for record in pl.simulate(pl.Distreal(), net, data, fleet, setting=setting, folder=run):
        print(f"round {record.round}: {record.ends}, {record.utilisation:.0%} of the compute used")
    for event in pl.events(run):
        if isinstance(event, pl.TaskRecord):
            rows = " ".join(str(row) for row in event.rows)
            print(f"device {event.device}, round {event.round}: {event.end}; rows {rows}")
