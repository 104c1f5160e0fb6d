"""`pliant server`: an experiment on real devices."""

import logging
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pliant.deploy.service import Service
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
    from pliant.experiment import load_experiment

    if (keys is None) != insecure:
        raise ValueError("Expected either --keys FOLDER (see `pliant deploy init`) or --insecure")
    experiment = load_experiment(spec, overrides)
    need_devices(experiment, experiment.fleet.size)
    folder = out or Path("runs") / spec.stem
    logging.basicConfig(level=logging.WARNING, format="pliant: %(message)s")
    service = service_of(allowance, patience, squeeze, pace)
    running = serving(experiment)(folder, service, host=host, port=port, keys=keys)
    open_run(folder, experiment)
    return shown(running, experiment.rounds)


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


def shown(running: "Running", rounds: int) -> int:
    """Show the rounds of a run until its end."""
    before = signal.signal(signal.SIGTERM, _end)
    try:
        with running:
            for record in running.watch():
                sys.stdout.write(line(record, rounds))
                sys.stdout.flush()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; the same command goes on\n")
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Protocol

    class Running(Protocol):
        """A server, or a whole federation."""

        def __enter__(self) -> "Running": ...

        def __exit__(self, *exception: object) -> None: ...

        def watch(self) -> Iterator[RoundRecord]: ...


def line(record: "RoundRecord", rounds: int) -> str:
    """Return what is shown of a round."""
    scored = "" if record.accuracy is None else f"  accuracy {record.accuracy:6.2%}"
    loss = "" if record.loss is None else f"  loss {record.loss:.3f}"
    ends = ", ".join(f"{count} {end}" for end, count in record.ends.items())
    return f"round {record.round + 1:>3}/{rounds}  {record.seconds:8.2f} s  {ends}{loss}{scored}\n"


def _end(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
