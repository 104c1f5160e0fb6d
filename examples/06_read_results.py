"""Read a run's folder: records as values, the trained network, and as a table with duckdb."""

import tempfile
from pathlib import Path

import pliant as pl

with tempfile.TemporaryDirectory() as folder:
    run = Path(folder, "run")
    net = pl.models.digits_cnn(classes=10)
    data = pl.data.digits().share(pl.Iid(), devices=10)
    fleet = pl.Fleet(size=10, speed=pl.Constant(low=0.5, high=1.0))
    list(pl.simulate(pl.FedAvg(), net, data, fleet, rounds=2, folder=run))

    rounds = [event for event in pl.events(run) if isinstance(event, pl.RoundRecord)]
    print("accuracy", [event.accuracy for event in rounds])
    print("gigamacs", sum(event.macs for event in rounds) / 1e9)

    net.load_state_dict(pl.trained(run))
    print("parameters", sum(tensor.numel() for tensor in net.parameters()))

    try:
        import duckdb
    except ImportError:
        print("duckdb is in the extra `report`: pip install 'pliant[report]'")
    else:
        query = 'SELECT "end", count(*), avg(seconds) FROM read_json(?) WHERE type = ? GROUP BY 1'
        print(duckdb.execute(query, [str(run / "events.jsonl"), "task"]).fetchall())
