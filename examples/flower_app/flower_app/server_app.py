"""The server: a pliant experiment, described as in its TOML files."""

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from pliant.deploy.flower.strategy import PliantStrategy
from pliant.experiment.config import Experiment
from pliant.value import decode

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train the digits network on as many devices as the federation has."""
    config = context.run_config
    experiment = {
        "method": {"type": "distreal"},
        "fleet": {"size": 3, "round_seconds": float(config["seconds"])},
        "per_round": 3,
    }
    strategy = PliantStrategy(decode(experiment, Experiment))

    def print_rejected(number: int, arrays: ArrayRecord) -> None:
        for device, reason in sorted(strategy.rejected.items()):
            print(f"round {number}: device {device} was not merged: {reason}")

    rounds = int(config["rounds"])
    arrays = strategy.arrays()
    result = strategy.start(grid, arrays, num_rounds=rounds, evaluate_fn=print_rejected)
    for number, metrics in result.train_metrics_clientapp.items():
        print(f"round {number}: {dict(metrics)}")
