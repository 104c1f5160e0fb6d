"""Split learning in the demo: bytes and seconds against accuracy."""

from typing import TYPE_CHECKING

from msgspec.structs import replace
from rich.table import Column, Table

import pliant as pl

if TYPE_CHECKING:
    from pliant.analysis.summary import SummaryRow
    from pliant.experiment.sweep import SweepRun

ROUNDS, EXCHANGES = 5, 3  # rounds in which AdaSplit's clients use the server
TEXT = (
    "Five clients share 3,000 digits and hold the first layer; the server holds the rest. SL-basic "
    "exchanges activations and gradients for every mini-batch; AdaSplit trains clients on their "
    "own, and only the most useful ones send activations in the second half; in one-shot split "
    "learning, clients train for a round, then send all activations once."
)


def make_runs(seed: int) -> "list[SweepRun]":
    """Return SL-basic, AdaSplit and one-shot split learning on the same clients."""
    from pliant.experiment.config import DataConfig, Experiment, NetworkConfig
    from pliant.experiment.sweep import SweepRun
    from pliant.split import AnySplit
    from pliant.split.base import SplitTraining

    local = SplitTraining(optimiser=pl.Adam(lr=1e-3), batch=32)
    speed = pl.ConstantTrace(low=0.5, high=1.0)
    device_class = pl.DeviceClass(up=2.5e6, down=5e6, latency=0.02)  # 20 and 40 Mbit/s
    fleet = pl.Fleet(5, speed, classes=(device_class,), macs_per_second=1e9)
    network, data = NetworkConfig("lenet_small"), DataConfig("digits", proxy=5000)
    methods: dict[str, AnySplit] = {
        "SL-basic": pl.VanillaSplit(local=local),
        "AdaSplit": pl.AdaSplit(local=local, kappa=1 - EXCHANGES / ROUNDS),
        "One-shot": pl.OneShotSplit(
            local=replace(local, period=ROUNDS + 1), local_share=1 / ROUNDS
        ),
    }
    runs = []
    for name, method in methods.items():
        experiment = Experiment(
            method, fleet, network, data, ROUNDS, per_round=5, seed=seed,
            rules=pl.RoundRules(late="wait"), server_speed=1e12,
        )  # fmt: skip
        runs.append(SweepRun((("method", name),), experiment))
    return runs


def make_table(rows: "list[SummaryRow]") -> Table:
    names = ("accuracy", "MB sent", "client GMACs", "seconds", "C3-Score")
    table = Table("method", *(Column(name, justify="right") for name in names), box=None)
    for row in rows:
        table.add_row(
            row.label,
            f"{row.mean_accuracy:.1%}",
            f"{row.megabytes:.1f}",
            f"{row.gigamacs:.1f}",
            f"{row.seconds:.0f}",
            f"{row.c3:.3f}",
        )
    return table


def describe_trade_off(basic: "SummaryRow", ada: "SummaryRow") -> str:
    points = 100 * (basic.mean_accuracy - ada.mean_accuracy)
    preferred = "SL-basic" if basic.c3 > ada.c3 else "AdaSplit"
    return (
        f"AdaSplit sends {ada.megabytes / basic.megabytes:.0%} of SL-basic's bytes and finishes in "
        f"{ada.seconds / basic.seconds:.0%} of its time, but its clients compute "
        f"{ada.gigamacs / basic.gigamacs:.1f} times as much. Its server trains in only {EXCHANGES} "
        f"rounds, and it ends {abs(points):.1f} points {'behind' if points > 0 else 'ahead'}; "
        f"the C3-Score, which weighs accuracy against bytes and compute, prefers {preferred} here."
    )


def describe_one_shot(basic: "SummaryRow", one_shot: "SummaryRow") -> str:
    points = 100 * (basic.mean_accuracy - one_shot.mean_accuracy)
    return (
        f"One-shot split learning ends {abs(points):.1f} points "
        f"{'behind' if points > 0 else 'ahead of'} SL-basic with "
        f"{one_shot.megabytes / basic.megabytes:.1%} of its bytes and "
        f"{one_shot.seconds / basic.seconds:.1%} of its time: the server keeps the activations and "
        "trains on them alone."
    )
