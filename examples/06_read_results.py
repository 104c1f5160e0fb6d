"""Read a run folder: its records, the trained network, and a query with duckdb."""

import tempfile
from pathlib import Path

import pliant as pl

with tempfile.TemporaryDirectory() as folder:
    run = Path(folder, "run")
    net = pl.models.digits_cnn(classes=10)
    data = pl.data.digits().share(pl.Iid(), devices=10)
    fleet = pl.Fleet(size=10, speed=pl.ConstantTrace(low=0.5, high=1.0))
    list(pl.simulate(pl.FedAvg(), net, data, fleet, rounds=2, folder=run))

    rounds = [record for record in pl.read_records(run) if isinstance(record, pl.RoundRecord)]
    print("accuracy", [record.accuracy for record in rounds])
    print("gigamacs", sum(record.macs for record in rounds) / 1e9)

    net.load_state_dict(pl.load_trained_params(run))
    print("parameters", sum(tensor.numel() for tensor in net.parameters()))

    try:
        import duckdb
    except ImportError:
        print("duckdb is not installed: run `pip install 'pliant[report]'`")
    else:
        query = "SELECT outcome, count(*), avg(seconds) FROM read_json(?) WHERE type = ? GROUP BY 1"
        print(duckdb.execute(query, [str(run / "events.jsonl"), "task"]).fetchall())
