"""Federated methods in the demo: resources that change within rounds, under three rules."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from msgspec.structs import replace
from rich.table import Column, Table

import pliant as pl

if TYPE_CHECKING:
    from pliant.analysis.summary import SummaryRow
    from pliant.experiment.sweep import SweepRun

SECONDS = 12.0  # of virtual time, for every method
TARGET = 0.9
WAIT, SEND, LOSE = "waits", "sent", "lost"  # what happens to work that is late
RULES: dict[str, Literal["wait", "partial", "discard"]] = {
    WAIT: "wait",
    SEND: "partial",
    LOSE: "discard",
}
BASELINE = "FedAvg"
TEXT = (
    "40 devices share 6,000 real digits; ten of them train in each round, which lasts one second. "
    "Each device's speed changes about twice per second, by up to a factor of four. Five methods "
    f"train for the same {SECONDS:.0f} virtual seconds, with learning rates tuned alike. Late "
    "devices send what they have, or their work is lost; FedAvg also runs with rounds that wait."
)


@dataclass(frozen=True)
class MethodResult:
    """How one method did under one rule."""

    method: str
    rule: str
    accuracy: float | None  # at the end of the shortest run
    seconds: float | None  # to the target; None: not reached
    arrived: float  # share of the devices' work that was merged


def make_runs(seed: int, table_path: Path) -> "list[SweepRun]":
    """Return the runs: every method under both deadline rules, and FedAvg that waits."""
    from pliant.experiment.config import DataConfig, Experiment, NetworkConfig
    from pliant.experiment.sweep import SweepRun
    from pliant.methods import AnyMethod

    # the best of experiments/async/tune_digits*.toml and experiments/digits/tune_demo.toml
    local = pl.LocalTraining(pl.Sgd(lr=0.2, clip=5.0), batch=16)
    careful = replace(local, optimiser=pl.Sgd(lr=0.1, clip=5.0))
    distreal = pl.Distreal(pl.load_table(table_path), local, budget="paced")
    methods: dict[tuple[str, str], AnyMethod] = {
        (WAIT, BASELINE): pl.FedAvg(local),
        (SEND, BASELINE): pl.FedAvg(local),
        (SEND, "half the network"): pl.SmallNetwork(local=replace(local, epochs=3)),
        (SEND, "HeteroFL"): pl.HeteroFl(local=careful),
        (SEND, "DISTREAL"): distreal,
        (SEND, "progressive"): pl.Progressive(local=replace(local, epochs=5)),
        (LOSE, BASELINE): pl.FedAvg(local),
        # one pass where a task that takes longer is lost
        (LOSE, "half the network"): pl.SmallNetwork(local=local),
        (LOSE, "HeteroFL"): pl.HeteroFl(local=careful),
        (LOSE, "DISTREAL"): distreal,
        (LOSE, "progressive"): pl.Progressive(local=local, adapts=True),
    }
    fleet = pl.Fleet(
        size=40,
        speed=pl.ChangingTrace(low=0.25, high=1.0, per_round=2.0),
        macs_per_second=281894400.0,  # one pass over a device's 150 images per second
    )
    network, data = NetworkConfig("digits_cnn"), DataConfig("digits", proxy=2000)
    return [
        SweepRun(
            (("method", name), ("late", rule)),
            Experiment(
                method,
                fleet,
                network,
                data,
                seconds=SECONDS,
                seed=seed,
                rules=pl.RoundRules(late=RULES[rule]),
                evaluation=pl.Evaluation(every_seconds=1.0),
            ),
        )
        for (rule, name), method in methods.items()
    ]


def read_results(rows: "Sequence[SummaryRow]") -> list[MethodResult]:
    """Return the results of the rows of a summary, at equal virtual time."""
    results = []
    for row in rows:
        (_, method), (_, rule) = row.group
        last = row.accuracy[0] if row.accuracy else None
        accuracy = last if row.equal_seconds is None else row.equal_accuracy
        arrived = 1 - (row.lost_share or 0.0)
        results.append(MethodResult(method, rule, accuracy, row.seconds_to_target, arrived))
    return results


def make_table(results: Sequence[MethodResult]) -> Table:
    """Return a table with a row per method and two columns per deadline rule."""
    headings = (f"at {SECONDS:.0f} s", f"to {TARGET:.0%}")
    columns = [
        Column(f"{rule}\n{heading}", justify="right", no_wrap=True)
        for rule in ("late work sent", "late work lost")
        for heading in headings
    ]
    table = Table(Column("\nmethod"), *columns, box=None)
    cells = {(result.rule, result.method): _format_result(result) for result in results}
    for name in dict.fromkeys(result.method for result in results):
        table.add_row(name, *cells.get((SEND, name), ("", "")), *cells.get((LOSE, name), ("", "")))
    table.add_row(f"{BASELINE}, waits", *cells[WAIT, BASELINE], "", "")
    return table


def _format_result(result: MethodResult) -> tuple[str, str]:
    accuracy = "-" if result.accuracy is None else f"{result.accuracy:.1%}"
    return accuracy, "never" if result.seconds is None else f"{result.seconds:.1f} s"


def describe_results(results: Sequence[MethodResult]) -> str:
    """Return who was first, and what arrived where late work is lost."""
    return f"{_describe_first(results)} {_describe_lost(results)}"


def _describe_first(results: Sequence[MethodResult]) -> str:
    times = {result.method: result.seconds for result in results if result.rule == SEND}
    seconds = min((time for time in times.values() if time is not None), default=None)
    if seconds is None:
        return f"No method reached {TARGET:.0%} in {SECONDS:.0f} s."
    first = [name for name, time in times.items() if time == seconds]
    verb = "reaches" if len(first) == 1 else "reach"
    text = f"{' and '.join(first)} {verb} {TARGET:.0%} first, after {seconds:.1f} s"
    if BASELINE not in first:
        text += f"; {BASELINE} {_format_time(times[BASELINE])} if late devices send what they have"
    [waiting] = [result for result in results if result.rule == WAIT]
    return f"{text}; {BASELINE} {_format_time(waiting.seconds)} if it waits for them."


def _format_time(seconds: float | None) -> str:
    return "does not reach it" if seconds is None else f"needs {seconds:.1f} s"


def _describe_lost(results: Sequence[MethodResult]) -> str:
    arrived = {result.method: result.arrived for result in results if result.rule == LOSE}
    shares = [f"{share:.0%} of {name}'s" for name, share in arrived.items()]
    return f"If late work is lost, {', '.join(shares[:-1])} and {shares[-1]} updates arrive."
