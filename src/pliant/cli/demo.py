"""`pliant demo`: a tour of pliant on the bundled digits."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from rich.table import Column, Table

import pliant as pl

if TYPE_CHECKING:
    from pliant.analysis.summary import SummaryRow
    from pliant.experiment.config import SearchRun
    from pliant.experiment.sweep import SweepRun

SECONDS = 20  # of virtual time, for every federated method
ROUNDS, EXCHANGES = 8, 4  # of split learning; rounds in which AdaSplit's clients use the server

INTRO_TEXT = (
    "40 devices share 6,000 real digits; ten of them train in each round, which lasts one second. "
    "Each device's speed changes about twice per second, by up to a factor of three."
)
SEARCH_TEXT = (
    "1. A search on 2,000 other digits finds how many filters each layer can drop. Before every "
    "mini-batch, DISTREAL picks from the resulting table what the device can afford."
)
TRAINING_TEXT = (
    f"2. Five methods train for the same {SECONDS} s on the same devices and digits. FedAvg waits "
    "for the slowest device of a round; in the others, devices send what they have at its end."
)
SPLIT_TEXT = (
    "3. Split learning: five clients share 3,000 digits and hold the first layer; the server holds "
    "the rest. SL-basic exchanges activations and gradients for every mini-batch; AdaSplit trains "
    "clients on their own, and only the most useful ones send activations in the second half; in "
    "one-shot split learning, clients train for a round, then send all activations once."
)


def demo(*, out: Path = Path("runs/demo"), seed: int = 0) -> None:
    """Search, train, split and report on the bundled digits, in about three minutes.

    Example: pliant demo --seed 1 --out runs/demo1

    Args:
        out: Folder for the runs and the report; finished runs in it are reused.
        seed: Seed of the devices and the weights.
    """
    try:
        _run_demo(Console(highlight=False), out, seed)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("run the same command to resume") from None


def _run_demo(console: Console, out: Path, seed: int) -> None:
    from pliant.analysis.summary import summarise
    from pliant.cli.search import run_search

    start = time.monotonic()
    _print(console, INTRO_TEXT, SEARCH_TEXT)
    run_search(_make_search(seed), out / "search")
    _print(console, TRAINING_TEXT)
    table_path = (out / "search" / "table.safetensors").resolve()
    federated_runs = _make_federated_runs(seed, table_path)
    _run_with_progress(console, federated_runs, out / "methods")
    _print(console, SPLIT_TEXT)
    split_runs = _make_split_runs(seed)
    _run_with_progress(console, split_runs, out / "split")
    console.print(_make_methods_table(federated_runs, out / "methods"))
    rows = summarise(split_runs, out / "split", target=0.9)
    console.print(_make_split_table(rows))
    basic, ada, one_shot = rows
    _print(console, _describe_trade_off(basic, ada), _describe_one_shot(basic, one_shot))
    _print(console, f"Total {time.monotonic() - start:.0f} s.")
    _write_report(console, [out / "search", out / "methods", out / "split"], out / "report")
    _print(console, f"To browse these runs: pliant dash {out}")


def _write_report(console: Console, folders: list[Path], report: Path) -> None:
    from pliant.cli.progress import show_steps
    from pliant.extras import MissingExtra
    from pliant.report.build import write_report

    try:
        with show_steps() as show_step:
            page = write_report(
                folders, report, target=0.9, command="pliant demo", on_progress=show_step
            )
    except MissingExtra as error:  # the results are printed above
        _print(console, f"No report: {error}")
    else:
        _print(console, f"Report: {page}")


def _print(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(line, soft_wrap=not console.is_terminal)


def _make_search(seed: int) -> "SearchRun":
    from pliant.experiment.config import DataConfig, NetworkConfig, SearchRun
    from pliant.table_search import SurrogateSearch

    short = pl.ShortTrainingSettings(batches=32, batch=32, eval_images=500)
    algorithm = SurrogateSearch(rounds=1, vectors=12)
    settings = pl.SearchSettings(algorithm, short, corner_seeds=4, fresh_seeds=2, rows=24)
    return SearchRun(settings, NetworkConfig("digits_cnn"), DataConfig("digits", proxy=2000), seed)


def _make_federated_runs(seed: int, table_path: Path) -> "list[SweepRun]":
    from pliant.experiment.config import DataConfig, Experiment, NetworkConfig
    from pliant.experiment.sweep import SweepRun
    from pliant.methods import AnyMethod

    local = pl.LocalTraining(pl.Sgd(lr=0.1, clip=5.0), batch=16)
    methods: dict[str, AnyMethod] = {
        "FedAvg, waits": pl.FedAvg(local),
        "FedProx, partial work": pl.FedProx(mu=0.0, local=local),
        "Federated Dropout": pl.FedDropout(local=local),
        "HeteroFL": pl.HeteroFl(local=local),
        "DISTREAL": pl.Distreal(pl.load_table(table_path), local, budget="paced"),
    }
    fleet = pl.Fleet(size=40, speed=pl.ChangingTrace(low=1 / 3, high=1.0, per_round=2.0))
    network, data = NetworkConfig("digits_cnn"), DataConfig("digits", proxy=2000)
    runs = []
    for name, method in methods.items():
        rules = pl.RoundRules(late="wait" if name == "FedAvg, waits" else "partial")
        experiment = Experiment(
            method, fleet, network, data, rounds=SECONDS, seed=seed, rules=rules
        )
        runs.append(SweepRun((("method", name),), experiment))
    return runs


def _make_split_runs(seed: int) -> "list[SweepRun]":
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
            local=msgspec.structs.replace(local, period=ROUNDS + 1), local_share=1 / ROUNDS
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


def _run_with_progress(console: Console, runs: "list[SweepRun]", folder: Path) -> None:
    from pliant.cli.compare import run_with_bar
    from pliant.experiment.sweep import is_finished

    if all(is_finished(folder / run.name) for run in runs):
        _print(console, f"   (finished earlier in {folder.parent}; choose another --out to rerun)")
    run_with_bar(runs, folder, pl.ProcessWorkers())


def _make_methods_table(runs: "list[SweepRun]", folder: Path) -> Table:
    from pliant.analysis.records import read_rounds

    table = _make_table("method", f"accuracy after {SECONDS} s", "rounds", "compute used")
    for run in runs:
        records = read_rounds(folder / run.name)
        rounds = [record for record in records if record.seconds <= SECONDS + 1e-6]
        method = run.group[0][1]
        if not rounds:
            table.add_row(method, "-", "0", "-")
            continue
        used = sum(record.useful for record in rounds) / sum(record.available for record in rounds)
        accuracy = f"{rounds[-1].accuracy or 0.0:.1%}"
        table.add_row(method, accuracy, str(len(rounds)), f"{used:.0%}")
    return table


def _make_split_table(rows: "list[SummaryRow]") -> Table:
    table = _make_table("method", "accuracy", "MB sent", "client GMACs", "seconds", "C3-Score")
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


def _describe_trade_off(basic: "SummaryRow", ada: "SummaryRow") -> str:
    points = 100 * (basic.mean_accuracy - ada.mean_accuracy)
    preferred = "SL-basic" if basic.c3 > ada.c3 else "AdaSplit"
    return (
        f"AdaSplit sends {ada.megabytes / basic.megabytes:.0%} of SL-basic's bytes and finishes in "
        f"{ada.seconds / basic.seconds:.0%} of its time, but its clients compute "
        f"{ada.gigamacs / basic.gigamacs:.1f} times as much. Its server trains in only {EXCHANGES} "
        f"rounds, and it ends {abs(points):.1f} points {'behind' if points > 0 else 'ahead'}; "
        f"the C3-Score, which weighs accuracy against bytes and compute, prefers {preferred} here."
    )


def _describe_one_shot(basic: "SummaryRow", one_shot: "SummaryRow") -> str:
    points = 100 * (basic.mean_accuracy - one_shot.mean_accuracy)
    return (
        f"One-shot split learning ends {abs(points):.1f} points "
        f"{'behind' if points > 0 else 'ahead of'} SL-basic with "
        f"{one_shot.megabytes / basic.megabytes:.1%} of its bytes and "
        f"{one_shot.seconds / basic.seconds:.1%} of its time: the server keeps the activations and "
        "trains on them alone."
    )


def _make_table(first: str, *others: str) -> Table:
    return Table(first, *(Column(name, justify="right") for name in others), box=None)
