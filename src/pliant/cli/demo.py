"""`pliant demo`: the whole of pliant once, on the digits that travel inside the package."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table as Grid

if TYPE_CHECKING:
    from pliant.compare import Member, Row
    from pliant.experiment import SearchRun

SECONDS = 20  # of virtual time, for every federated method
ROUNDS, EXCHANGES = 8, 4  # of split learning; in so many of them AdaSplit's clients talk

OPENING = (
    "40 devices share 6,000 real digits; ten of them train in a round, which lasts a second. How "
    "fast each of them is changes about twice in every second, by up to a factor of three."
)
SEARCHED = (
    "1. A search on 2,000 other digits finds which layers can do without how many filters. "
    "DISTREAL picks from its table, in front of every mini-batch, what the device can pay then."
)
TRAINED = (
    f"2. Five methods have the same {SECONDS} s, the same devices and the same digits. FedAvg "
    "waits for the slowest device of a round; the others send what they have when a round is over."
)
SPLIT = (
    "3. Split learning: five clients share 3,000 digits and keep their first layer; the rest is "
    "on a server. SL-basic exchanges activations and gradients for every mini-batch; AdaSplit "
    "trains clients by themselves, and lets the most useful ones talk in the second half."
)


def demo(*, out: Path = Path("runs/demo"), seed: int = 0) -> None:
    """Search, train, split and report on the embedded digits, in about three minutes.

    Example: pliant demo --seed 1 --out runs/demo1

    Args:
        out: Folder for the runs and the report; what is finished there is kept.
        seed: Another seed gives other devices and weights; the same gives the same result.
    """
    try:
        _shown(Console(highlight=False), out, seed)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("the same command goes on from here") from None


def _shown(console: Console, out: Path, seed: int) -> None:
    from pliant.cli.progress import steps
    from pliant.compare import table
    from pliant.report.build import write_report

    began = time.monotonic()
    _say(console, OPENING, SEARCHED)
    found = _searched(_search(seed), out / "search")
    _say(console, TRAINED)
    methods = _federated(seed, found)
    _run(console, methods, out / "methods")
    _say(console, SPLIT)
    pair = _split(seed)
    _run(console, pair, out / "split")
    console.print(_methods_grid(methods, out / "methods"))
    rows = table(pair, out / "split", target=0.9)
    console.print(_split_grid(rows))
    _say(console, _trade(*rows))
    _say(console, f"{time.monotonic() - began:.0f} s in all; now the report.")
    parts = [out / "search", out / "methods", out / "split"]
    with steps() as tell:
        page = write_report(parts, out / "report", target=0.9, command="pliant demo", tell=tell)
    _say(console, f"Report: {page}", f"Live page of these runs: pliant dash {out}")


def _say(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(line, soft_wrap=not console.is_terminal)


def _search(seed: int) -> "SearchRun":
    from pliant.experiment import Data, Network, SearchRun
    from pliant.explore import Exploration
    from pliant.explore.fast import Fast
    from pliant.explore.objective import Objective

    short = Objective(batches=32, batch=32, evaluated=500)
    how = Exploration(Fast(rounds=1, vectors=12), short, normalisers=4, fresh=2, rows=24)
    return SearchRun(how, Network("digits_cnn"), Data("digits", proxy=2000), seed)


def _searched(asked: "SearchRun", folder: Path) -> str:
    """Search, or take what was found before, and return where the table is."""
    from pliant.cli.search import shown

    shown(asked, folder)
    return str((folder / "table.safetensors").resolve())


def _federated(seed: int, table: str) -> "list[Member]":
    from pliant.compare import Member
    from pliant.devices import Changing, Fleet
    from pliant.engine.rules import Rules
    from pliant.experiment import Data, Experiment, Network
    from pliant.explore import load_table
    from pliant.methods import AnyMethod, Distreal, FedAvg, FedDropout, FedProx, HeteroFl, Local
    from pliant.nn.optimiser import Sgd

    local = Local(Sgd(lr=0.1, clip=5.0), batch=16)
    runs: dict[str, tuple[AnyMethod, Rules]] = {
        "FedAvg, waits": (FedAvg(local), Rules(late="wait")),
        "FedProx, partial work": (FedProx(mu=0.0, local=local), Rules(late="partial")),
        "Federated Dropout": (FedDropout(local=local), Rules(late="partial")),
        "HeteroFL": (HeteroFl(local=local), Rules(late="partial")),
        "DISTREAL": (
            Distreal(load_table(Path(table)), local, budget="paced"),
            Rules(late="partial"),
        ),
    }
    fleet = Fleet(size=40, speed=Changing(low=1 / 3, high=1.0, per_round=2.0))
    network, data = Network("digits_cnn"), Data("digits", proxy=2000)
    return [
        Member(
            (("method", name),),
            Experiment(method, fleet, network, data, rounds=SECONDS, seed=seed, rules=rules),
        )
        for name, (method, rules) in runs.items()
    ]


def _split(seed: int) -> "list[Member]":
    from pliant.compare import Member
    from pliant.devices import Constant, DeviceClass, Fleet
    from pliant.engine.rules import Rules
    from pliant.experiment import Data, Experiment, Network
    from pliant.nn.optimiser import Adam
    from pliant.split import AdaSplit, AnySplit, Split
    from pliant.split.base import Local

    local = Local(optimiser=Adam(lr=1e-3), batch=32)
    link = DeviceClass(up=2.5e6, down=5e6, latency=0.02)  # 20 and 40 Mbit/s
    fleet = Fleet(5, Constant(low=0.5, high=1.0), classes=(link,), macs_per_second=1e9)
    data = Data("digits", proxy=5000)
    methods: dict[str, AnySplit] = {
        "SL-basic": Split(local=local),
        "AdaSplit": AdaSplit(local=local, kappa=1 - EXCHANGES / ROUNDS),
    }
    return [
        Member(
            (("method", name),),
            Experiment(
                method,
                fleet,
                Network("lenet_small"),
                data,
                rounds=ROUNDS,
                per_round=5,
                seed=seed,
                rules=Rules(late="wait"),
                server_speed=1e12,
            ),
        )
        for name, method in methods.items()
    ]


def _run(console: Console, found: "list[Member]", folder: Path) -> None:
    from pliant.cli.progress import bar
    from pliant.compare import is_finished, run_all
    from pliant.engine.workers import Processes

    done = [member for member in found if is_finished(folder / member.name, member)]
    if len(done) == len(found):
        _say(console, f"   (kept from before; another --out than {folder.parent} runs them anew)")
    with bar("runs", len(found), len(done)) as show:

        def tell(member: "Member") -> None:
            done.append(member)
            show(len(done))

        run_all(found, folder, Processes(), tell)


def _methods_grid(found: "list[Member]", folder: Path) -> Grid:
    from pliant.engine.ledger import RoundRecord
    from pliant.engine.store import events

    grid = _grid("method", f"accuracy after {SECONDS} s", "rounds", "compute used")
    for member in found:
        lines = [
            line
            for line in events(folder / member.name)
            if isinstance(line, RoundRecord) and line.seconds <= SECONDS + 1e-6
        ]
        if not lines:
            grid.add_row(member.group[0][1], "-", "0", "-")
            continue
        used = sum(line.useful for line in lines) / sum(line.available for line in lines)
        scored = f"{lines[-1].accuracy or 0.0:.1%}"
        grid.add_row(member.group[0][1], scored, str(len(lines)), f"{used:.0%}")
    return grid


def _split_grid(rows: "list[Row]") -> Grid:
    grid = _grid("method", "accuracy", "MB sent", "client GMACs", "seconds", "C3-Score")
    for row in rows:
        grid.add_row(
            row.group[0][1],
            f"{row.accuracy[0]:.1%}",
            f"{row.megabytes:.1f}",
            f"{row.gigamacs:.1f}",
            f"{row.seconds:.0f}",
            f"{row.c3:.3f}",
        )
    return grid


def _trade(basic: "Row", ada: "Row") -> str:
    """Say what AdaSplit gave up here, and for what."""
    points = 100 * (basic.accuracy[0] - ada.accuracy[0])
    preferred = "SL-basic" if basic.c3 > ada.c3 else "AdaSplit"
    return (
        f"AdaSplit sends {ada.megabytes / basic.megabytes:.0%} of SL-basic's bytes and is done in "
        f"{ada.seconds / basic.seconds:.0%} of its time, while its clients compute "
        f"{ada.gigamacs / basic.gigamacs:.1f} times as much. Its server learns in {EXCHANGES} "
        f"rounds only, and it ends {abs(points):.1f} points {'behind' if points > 0 else 'ahead'}; "
        f"the C3-Score, bytes and compute against accuracy, prefers {preferred} here."
    )


def _grid(*names: str) -> Grid:
    grid = Grid(*names, box=None)
    for column in grid.columns[1:]:
        column.justify = "right"
    return grid
