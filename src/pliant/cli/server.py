"""`pliant server`: run an experiment on real devices."""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App

from pliant.cli import INTEGER, server_devices, server_status

if TYPE_CHECKING:
    from pliant.deploy.settings import ServerSettings
    from pliant.deploy.supervise.federation import Federation
    from pliant.deploy.supervise.server import ServerSupervisor
    from pliant.engine.ledger import RoundRecord
    from pliant.experiment.config import Experiment

PaceName = Literal["measured", "simulated"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]
TransportName = Literal["flower", "grpc"]

app = App(name="server", help_format="plaintext")
app.command(server_devices.app)
app.command(server_status.status)


@app.default
def server(
    spec: Path,
    *overrides: str,
    keys: Path | None = None,
    insecure: bool = False,
    host: str = "127.0.0.1",
    port: Annotated[int, INTEGER] = 9092,
    out: Path | None = None,
    allowance: float = 15.0,
    patience: float = 120.0,
    pace: PaceName = "measured",
    transport: TransportName = "flower",
    metrics_port: Annotated[int | None, INTEGER] = None,
    metrics_host: str = "127.0.0.1",
    log_level: LogLevel = "info",
    log_format: LogFormat = "text",
    log_file: Path | None = None,
) -> int:
    """Run or resume an experiment on devices that connect to this machine.

    Example: pliant server digits.toml --keys keys --host 0.0.0.0

    Args:
        spec: TOML file of the experiment; `fleet.size` is the number of devices,
            `fleet.round_seconds` the time that each has in a round.
        overrides: key=value pairs that override the file, like rounds=20 or fleet.round_seconds=60.
        keys: Folder made by `pliant deploy init`.
        insecure: Use neither TLS nor keys; only on loopback.
        host: Address to listen on.
        port: Port to listen on.
        out: Folder of the run; by default runs/NAME. If it already holds this run, the run resumes.
        allowance: Seconds for transport, in addition to a device's own time; with a split method,
            seconds of silence after which the round continues without a device.
        patience: Seconds to wait for devices at the start; later rounds wait for `allowance`.
        pace: Let devices pace themselves by measured speed, or rehearse the simulation of the file.
        transport: What carries federated methods: Flower, or gRPC for rounds of less than some
            seconds; devices follow. Split methods always use gRPC.
        metrics_port: Port for /healthz, /readyz and Prometheus' /metrics; by default none.
        metrics_host: Address to listen on for these; anybody who reaches it can read them.
        log_level: Least level of messages to log.
        log_format: Log plain text, or one JSON object per line.
        log_file: File for the log, which rotates at 10 MB; by default the standard error output.
    """
    from pliant.deploy.logs import set_up_logging
    from pliant.deploy.security.certificates import check_server_keys
    from pliant.deploy.supervise.federation import open_run, select_server_kind
    from pliant.deploy.supervise.monitor import open_monitor
    from pliant.deploy.supervise.server import ServerSupervisor
    from pliant.experiment.config import load_experiment

    if (keys is None) != insecure:
        raise ValueError("Expected either --keys FOLDER (see `pliant deploy init`) or --insecure")
    experiment, folder = load_experiment(spec, overrides), out or Path("runs") / spec.stem
    experiment = check_experiment(experiment, pace)
    if keys is not None:
        check_server_keys(keys)
    settings = make_server_settings(allowance, patience, pace, transport)
    kind = select_server_kind(experiment, transport)
    supervisor = ServerSupervisor(kind, folder, settings, host=host, port=port, keys=keys)
    set_up_logging(log_level, log_format, log_file)
    with open_monitor(supervisor, metrics_host, metrics_port):
        open_run(folder, experiment)  # last, so that a failed start leaves no folder
        return show_rounds(supervisor, experiment, folder, format_address(host, port, keys))


def check_experiment(experiment: "Experiment", pace: PaceName = "measured") -> "Experiment":
    """Build an experiment once, to find errors before creating a folder; return it as it is run."""
    from pliant.deploy.messages import has_own_data
    from pliant.engine.split_loop import check_split_rules
    from pliant.experiment.build import (
        build_experiment,
        build_server_context,
        build_session,
        check_deployable,
        choose_statistics,
        load_server_data,
    )
    from pliant.split import AnySplit
    from pliant.split.session import Session

    method, fleet = experiment.method, experiment.fleet
    if has_own_data(experiment, pace):
        experiment = choose_statistics(experiment)
        if isinstance(method, AnySplit):
            check_split_rules(experiment.settings, fleet, fleet.size)
            build_session(experiment, only_client=0, data=load_server_data(experiment))
        else:
            build_server_context(experiment)
        return experiment
    net, data = build_experiment(experiment)
    if isinstance(method, AnySplit):
        if fleet.size != len(data):
            raise ValueError(
                f"Expected {len(data)} devices, one per client of the data, got {fleet.size}"
            )
        Session(method, net, data, fleet, experiment.seed, only_client=0)
    else:
        check_deployable(experiment)
    return experiment


def make_server_settings(
    allowance: float, patience: float, pace: PaceName, transport: TransportName
) -> "ServerSettings":
    from pliant.deploy.settings import ServerSettings
    from pliant.value import decode

    raw = {"allowance": allowance, "patience": patience, "pace": pace, "transport": transport}
    return decode(raw, ServerSettings)


def format_address(host: str, port: int, keys: Path | None) -> str:
    return f"{host}:{port} ({'no TLS' if keys is None else 'TLS'})"


def show_rounds(
    supervisor: "ServerSupervisor | Federation",
    experiment: "Experiment",
    folder: Path,
    address: str,
) -> int:
    """Run the supervisor and print the rounds until the run ends."""
    from pliant.deploy.supervise.child_process import run_supervisor
    from pliant.split import AnySplit

    is_split, expected = isinstance(experiment.method, AnySplit), experiment.fleet.size
    if not is_split:
        expected = min(expected, experiment.rules.selection_size(experiment.per_round))
    try:
        with run_supervisor(supervisor):
            _print(f"listening on {address}, waiting for {expected} device{'s' * (expected > 1)}\n")
            records, rounds = supervisor.watch(), experiment.rounds
            for text in format_rounds(records, folder, rounds=rounds, is_retried=not is_split):
                _print(text)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; run the same command to resume\n")
        return 130
    _print(f"the run is saved in {folder}\n")
    return 0


def format_rounds(
    records: "Iterable[RoundRecord]", folder: Path, *, rounds: int, is_retried: bool
) -> Iterator[str]:
    """Yield the lines that describe rounds; each reason for a lost task is given once.

    A round that merged no update keeps its number and is tried again, unless the method splits the
    network.
    """
    seen: set[str] = set()
    merged = 0
    for record in records:
        merged += record.merged > 0
        number = record.round + 1
        if is_retried:
            number = merged + (not record.merged)
        head = f"round {number:>3}/{rounds}"
        if record.merged:
            yield head + _format_round(record)
            for reason in sorted(set(_list_reasons(record, folder)) - seen):
                seen.add(reason)
                yield f"    {reason}\n"
        else:
            counts = _count_outcomes(record, folder).most_common()
            outcomes = "; ".join(f"{count} {outcome}" for outcome, count in counts)
            retry = "; retrying from the same network" if is_retried else ""
            yield f"{head} merged no update ({outcomes}){retry}\n"


def _format_round(record: "RoundRecord") -> str:
    from pliant.cli.progress import format_scores

    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in record.outcomes.items())
    return f"  {record.seconds:8.2f} s  {outcomes}{format_scores(record)}\n"


def _list_reasons(record: "RoundRecord", folder: Path) -> Iterator[str]:
    if record.merged < record.tasks:  # read the file only if a task was lost
        yield from (outcome for outcome in _count_outcomes(record, folder) if ":" in outcome)


def _count_outcomes(record: "RoundRecord", folder: Path) -> Counter[str]:
    """Count the outcomes of a round's tasks with their reasons, which only the file has."""
    from pliant.engine.ledger import TaskRecord
    from pliant.engine.run_store import read_records

    tasks = (task for task in read_records(folder) if isinstance(task, TaskRecord))
    return Counter(" ".join(task.outcome.split()) for task in tasks if task.round == record.round)


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
