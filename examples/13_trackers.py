"""Copy the rounds of a run to an experiment tracker: Weights & Biases or MLflow."""

import sys
import tempfile
from collections.abc import Iterator

import pliant as pl


def iter_metrics(run: str) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield the number and the metrics of every round."""
    for record in pl.read_records(run):
        if isinstance(record, pl.RoundRecord):
            names = ("seconds", "macs", "up", "down", "utilisation", "loss", "accuracy")
            values = {name: getattr(record, name) for name in names}
            yield record.round + 1, {k: v for k, v in values.items() if v is not None}


def log_to_wandb(run: str, project: str) -> None:
    import wandb

    with wandb.init(project=project) as tracked:
        for step, metrics in iter_metrics(run):
            tracked.log(metrics, step=step)


def log_to_mlflow(run: str, experiment: str) -> None:
    import mlflow

    mlflow.set_experiment(experiment)
    with mlflow.start_run():
        for step, metrics in iter_metrics(run):
            mlflow.log_metrics(metrics, step=step)


if __name__ == "__main__":
    if len(sys.argv) == 3:  # a run and a project
        log_to_wandb(*sys.argv[1:])
    else:
        with tempfile.TemporaryDirectory() as run:
            data = pl.data.digits().share(pl.Iid(), devices=4, proxy=7900)
            net, fleet = pl.models.digits_cnn(), pl.Fleet(size=4)
            list(pl.simulate(pl.FedAvg(), net, data, fleet, rounds=2, folder=run))
            for step, metrics in iter_metrics(run):
                print(step, metrics)
