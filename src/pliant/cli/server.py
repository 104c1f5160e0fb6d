"""`pliant server`: an experiment on real devices."""

import logging
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pliant.deploy.federation import Federation
    from pliant.deploy.server import Server
    from pliant.deploy.service import Service
    from pliant.deploy.split_server import SplitServer
    from pliant.engine.ledger import RoundRecord
    from pliant.experiment import Experiment

Squeeze = Literal["plain", "fp16", "int8", "topk"]


def server(
    spec: Path,
    *overrides: str,
    keys: Path | None = None,
    insecure: bool = False,
    host: str = "127.0.0.1",
    port: int = 9092,
    out: Path | None = None,
    allowance: float = 15.0,
    patience: float = 120.0,
    squeeze: Squeeze = "plain",
    pace: Literal["measured", "fleet"] = "measured",
) -> int:
    """Run an experiment on devices that connect to this machine, or go on with it.

    Example: pliant server digits.toml --keys keys --host 0.0.0.0

    Parameters
    ----------
    spec
        The experiment's TOML file; `fleet.size` is the number of devices, `fleet.round_seconds` the
        time that each has for a round.
    overrides
        key=value in the place of what the file says, like rounds=20 or fleet.round_seconds=60.
    keys
        Folder that `pliant deploy init` has made.
    insecure
        Neither TLS nor keys; on loopback only.
    host
        Address to listen at.
    port
        Port to listen at.
    out
        Folder of the run; runs/NAME by default. If it holds this run already, it goes on.
    allowance
        Seconds for transport, beyond a device's own time; with a split method, seconds without a
        word from a device after which the round goes on without it.
    patience
        Seconds to wait for devices at the start; later rounds wait for `allowance`.
    squeeze
        How devices make their updates smaller: plain, fp16, int8 or topk (a tenth of the entries).
    pace
        What devices follow: what they measure, or, to rehearse, the fleet of the file.
    """
    from pliant.deploy.federation import open_run, serving
    from pliant.deploy.keys import need_fleet
    from pliant.experiment import load_experiment

    if (keys is None) != insecure:
        raise ValueError("Expected either --keys FOLDER (see `pliant deploy init`) or --insecure")
    experiment = load_experiment(spec, overrides)
    need_devices(experiment, experiment.fleet.size)
    if keys is not None:
        need_fleet(keys, experiment.fleet.size)
    folder = out or Path("runs") / spec.stem
    service = service_of(allowance, patience, squeeze, pace)
    running = serving(experiment)(folder, service, host=host, port=port, keys=keys)
    open_run(folder, experiment)  # last: what cannot be served leaves no folder
    return shown(running, experiment, folder, place(host, port, keys))


def need_devices(experiment: "Experiment", count: int) -> None:
    """Build what an experiment describes, so that what cannot be run leaves no folder."""
    from pliant.engine.split import session_of
    from pliant.experiment import build
    from pliant.split import AnySplit

    net, data = build(experiment)
    method = experiment.method
    if isinstance(method, AnySplit):
        if count != len(data):
            raise ValueError(f"Expected {len(data)} devices, one a client of the data, got {count}")
        session_of(method, net, data, experiment.fleet, experiment.seed, only=0)


def service_of(
    allowance: float, patience: float, squeeze: Squeeze, pace: Literal["measured", "fleet"]
) -> "Service":
    """Return how the server runs its rounds."""
    from pliant.deploy.service import Service
    from pliant.value import decode

    told = {"allowance": allowance, "patience": patience, "pace": pace}
    return decode(told | {"squeeze": {"type": squeeze}}, Service)


def place(host: str, port: int, keys: Path | None) -> str:
    """Return where a server listens, as one reads it."""
    return f"{host}:{port} ({'no TLS' if keys is None else 'TLS'})"


def shown(
    running: "Server | SplitServer | Federation", experiment: "Experiment", folder: Path, where: str
) -> int:
    """Show the rounds of a run until its end."""
    from pliant.deploy.processes import kept
    from pliant.split import AnySplit

    logging.basicConfig(level=logging.WARNING, format="pliant: %(message)s")
    logging.getLogger("pliant").setLevel(logging.INFO)  # who has come
    is_split, size = isinstance(experiment.method, AnySplit), experiment.fleet.size
    wanted = size if is_split else min(size, experiment.rules.selected(experiment.per_round))
    try:
        with kept(running):
            _say(f"listening at {where}, waiting for {wanted} device{'s' * (wanted > 1)}\n")
            for text in lines(
                running.watch(), folder, rounds=experiment.rounds, is_tried_again=not is_split
            ):
                _say(text)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; the same command goes on\n")
        return 130
    _say(f"the run is in {folder}\n")
    return 0


def lines(
    records: "Iterable[RoundRecord]", folder: Path, *, rounds: int, is_tried_again: bool
) -> Iterator[str]:
    """Yield what is shown of rounds; why a task was in vain is told once for each reason.

    A round that came to nothing is tried again, unless the method splits the network; it then has
    the number of the round that it was to be.
    """
    told: set[str] = set()
    merged = 0
    for record in records:
        merged += record.merged > 0
        number = record.round + 1
        if is_tried_again:
            number = merged + (not record.merged)
        head = f"round {number:>3}/{rounds}"
        if record.merged:
            yield head + _sums(record)
            for reason in sorted(set(_reasons(record, folder)) - told):
                told.add(reason)
                yield f"    {reason}\n"
        else:
            why = "; ".join(f"{count} {end}" for end, count in _ends(record, folder).most_common())
            again = "; again from the same network" if is_tried_again else ""
            yield f"{head} came to nothing ({why}){again}\n"


def _sums(record: "RoundRecord") -> str:
    scored = "" if record.accuracy is None else f"  accuracy {record.accuracy:6.2%}"
    loss = "" if record.loss is None else f"  loss {record.loss:.3f}"
    ends = ", ".join(f"{count} {end}" for end, count in record.ends.items())
    return f"  {record.seconds:8.2f} s  {ends}{loss}{scored}\n"


def _reasons(record: "RoundRecord", folder: Path) -> Iterator[str]:
    if record.merged < record.tasks:  # the file is read only where something went wrong
        yield from (end for end in _ends(record, folder) if ":" in end)


def _ends(record: "RoundRecord", folder: Path) -> Counter[str]:
    """Return how the tasks of a round ended, with their reasons, which only the file has."""
    from pliant.engine.ledger import TaskRecord
    from pliant.engine.store import events

    tasks = (found for found in events(folder) if isinstance(found, TaskRecord))
    return Counter(" ".join(task.end.split()) for task in tasks if task.round == record.round)


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
