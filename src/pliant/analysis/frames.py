"""The records of a run as a table of pandas.

They are decoded as everywhere else: DuckDB refuses a file whose last line is not complete, as in a
run that is active or was killed, and mixes the columns of tasks and rounds.
"""

from pathlib import Path
from typing import Any, Literal

from pliant.engine.ledger import RoundRecord, TaskRecord
from pliant.engine.run_store import read_records
from pliant.extras import require
from pliant.value import encode


def frame(run: str | Path, kind: Literal["rounds", "tasks"] = "rounds") -> Any:
    """Return the rounds or the tasks of the run in a folder as a pandas DataFrame, one per row.

    Nested values have columns such as `score.loss`; a round also has its `accuracy`.

    >>> import tempfile
    >>> import pliant as pl
    >>> data = pl.data.digits().share(pl.Iid(), devices=4, proxy=7900)
    >>> net, fleet = pl.models.digits_cnn(), pl.Fleet(size=4)
    >>> with tempfile.TemporaryDirectory() as run:
    ...     records = list(pl.simulate(pl.FedAvg(), net, data, fleet, rounds=2, folder=run))
    ...     pl.frame(run)["seconds"].tolist()
    [1.0, 2.0]
    """
    pandas = require("pandas", "notebook")
    record_type = RoundRecord if kind == "rounds" else TaskRecord
    records = [record for record in read_records(run) if isinstance(record, record_type)]
    rows = [encode(record) for record in records]
    for row, record in zip(rows, records, strict=True):
        del row["type"]
        if isinstance(record, RoundRecord):
            row["accuracy"] = record.accuracy
    return pandas.json_normalize(rows)
