"""The server: an experiment of pliant's, told as its TOML files tell it."""

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from pliant.deploy.flower import PliantStrategy
from pliant.experiment import Experiment
from pliant.value import decode

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train the digits network on as many devices as the federation has."""
    config = context.run_config
    plain = {
        "method": {"type": "distreal"},
        "fleet": {"size": 3, "round_seconds": float(config["seconds"])},
        "per_round": 3,
    }
    experiment = decode(plain, Experiment)
    strategy = PliantStrategy(experiment)

    def tell(number: int, arrays: ArrayRecord) -> None:
        for device, why in sorted(strategy.refused.items()):
            print(f"round {number}: device {device} did not count: {why}")

    rounds = int(config["rounds"])
    result = strategy.start(grid, strategy.arrays(), num_rounds=rounds, evaluate_fn=tell)
    for number, told in result.train_metrics_clientapp.items():
        print(f"round {number}: {dict(told)}")
