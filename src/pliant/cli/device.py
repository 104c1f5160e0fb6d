"""`pliant device`: run this machine as a device of a federation."""

import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App

from pliant.cli import INTEGER

if TYPE_CHECKING:
    from pliant.deploy.device.host import Limits


app = App(name="device", help_format="plaintext")


@app.default
def device(
    *,
    server: str | None = None,
    number: Annotated[int, INTEGER] = 0,
    keys: Path | None = None,
    insecure: bool = False,
    state: Path | None = None,
    cpu_share: float = 1.0,
    only_when_charging: bool = False,
    data: Path | None = None,
    dataset: str | None = None,
    test_share: float = 0.2,
    max_samples: Annotated[int | None, INTEGER] = None,
    classes: Literal["declared", "hidden"] = "declared",
    code: Path | None = None,
    disk_quota: float = 1e9,
    dry_run: Path | None = None,
    log_level: Literal["debug", "info", "warning", "error"] = "warning",
    log_format: Literal["text", "json"] = "text",
    log_file: Path | None = None,
) -> int:
    """Connect to a server and train on this machine, with its own data, when it requests it.

    Example: pliant device --server example.org:9092 --keys key --data photos

    Args:
        server: HOST:PORT of the server.
        number: This device's number, from 0; with --keys, its folder says it.
        keys: Folder of `pliant device enrol`.
        insecure: Use neither TLS nor a key; only for a server on loopback.
        state: Folder for state that survives a restart; by default ~/.pliant/device-NUMBER.
        cpu_share: Largest share of one core that training may use.
        only_when_charging: Do not train on battery.
        data: This device's images: a folder per class, idx, NPZ, CSV or Parquet files. In a
            rehearsal, the folder of the data sets.
        dataset: file.py:function that returns this device's images, instead of --data.
        test_share: Share of the images that is kept for tests, unless they come in two parts.
        max_samples: Most images to train on in a round; by default as many as there are at first.
        classes: Tell the server which classes this device has, or hide them.
        code: Folder of user code that experiments may import; without it, none is run.
        disk_quota: Most bytes for the states of experiments; the oldest are deleted first.
        dry_run: TOML file of an experiment; print what would leave this device, and send nothing.
        log_level: Least level of messages to log.
        log_format: Log plain text, or one JSON object per line.
        log_file: File for the log, which rotates at 10 MB; by default the standard error output.
    """
    from pliant.deploy.device.host import Limits
    from pliant.deploy.logs import set_up_logging
    from pliant.value import decode

    if number < 0:
        raise ValueError(f"Expected --number from 0, got {number}")
    if not 0 < cpu_share <= 1:
        raise ValueError(f"Expected --cpu-share above 0 and up to 1, got {cpu_share:g}")
    if state is not None and state.exists() and not state.is_dir():
        raise NotADirectoryError(f"Expected a folder for --state, got the file {state}")
    if data is not None and dataset is not None:
        raise ValueError("Expected either --data or --dataset, got both")
    raw = {
        "cpu_share": cpu_share,
        "only_when_charging": only_when_charging,
        "data": resolve_path("--data", data),
        "code": resolve_folder("--code", code),
        "dataset": None if dataset is None else _resolve_function("--dataset", dataset),
        "test_share": test_share,
        "max_samples": max_samples,
        "hide_classes": classes == "hidden",
        "disk_quota": disk_quota,
    }
    limits = decode(raw, Limits)
    if dry_run is not None:
        return _print_messages(dry_run, number, limits)
    if server is None:
        raise ValueError("Expected --server HOST:PORT or --dry-run EXPERIMENT.toml")
    if (keys is None) != insecure:
        raise ValueError("Expected either --keys FOLDER or --insecure")
    set_up_logging(log_level, log_format, log_file)
    return _run_device(server, number, keys, state, limits)


@app.command
def enrol(*, server: str, keys: Path, token: str | None = None) -> None:
    """Make this device's key and send its public half to a server, which must approve it.

    Example: pliant device enrol --server example.org:9092 --token TOKEN --keys key

    Args:
        server: HOST:PORT of the server.
        keys: New folder for the key, which stays on this device. With a token of `pliant server
            devices rotate`, the folder of the key to replace.
        token: Token of `pliant server devices token`; by default the first line of the standard
            input, which other users of this machine cannot see.
    """
    from pliant.extras import require

    require("cryptography", "deploy")
    from pliant.deploy.security.enrolment import enrol_device
    from pliant.deploy.security.probe import split_address
    from pliant.deploy.security.registry import parse_token

    parsed = parse_token(sys.stdin.readline() if token is None else token)
    fingerprint = enrol_device(*split_address(server), parsed, keys)
    sys.stdout.write(f"device {parsed.number} is enrolled; its key is {fingerprint}\n")


def _print_messages(spec: Path, number: int, limits: "Limits") -> int:
    """Print the messages of a device in the first round of an experiment."""
    from pliant.deploy.supervise import dry_run
    from pliant.experiment.config import load_experiment
    from pliant.split import AnySplit

    experiment = load_experiment(spec)
    is_split = isinstance(experiment.method, AnySplit)
    preview = dry_run.preview_frames if is_split else dry_run.preview_messages
    for line in preview(experiment, number, limits):
        sys.stdout.write(f"{line}\n")
    return 0


def _run_device(
    server: str, number: int, keys: Path | None, state: Path | None, limits: "Limits"
) -> int:
    from pliant.deploy.security.certificates import find_device_files
    from pliant.deploy.security.probe import parse_server_address, wait_for_server
    from pliant.deploy.settings import ServerChanged
    from pliant.deploy.supervise.child_process import interrupt_on_signal, run_supervisor
    from pliant.deploy.supervise.node import DeviceSupervisor

    ca, key = None, None
    if keys is not None:
        ca, key, number = find_device_files(keys)
    folder = state or Path.home() / ".pliant" / f"device-{number}"
    address = parse_server_address(server, ca, key)
    try:
        with interrupt_on_signal():
            sys.stdout.write(f"device {number} of {server}; press Ctrl-C to stop\n")
            sys.stdout.flush()
            while True:
                kind = wait_for_server(*address, ca)
                supervisor = DeviceSupervisor(kind, number, server, folder, limits, ca=ca, key=key)
                with suppress(ServerChanged), run_supervisor(supervisor):
                    supervisor.watch()
    except KeyboardInterrupt:
        return 130
    return 0


def _resolve_function(option: str, name: str) -> str:
    """Return an option's function with an absolute path; raise if its file does not exist."""
    from pliant.experiment.user_code import is_user_function, make_absolute

    file, _, function = name.rpartition(":")
    if not is_user_function(name) or not function.isidentifier():
        raise ValueError(f"Expected file.py:function for {option}, got {name}")
    if file.endswith(".py") and not Path(file).is_file():
        raise FileNotFoundError(f"Expected an existing Python file for {option}, got {file}")
    return make_absolute(name, Path())


def resolve_path(option: str, path: Path | None) -> str | None:
    """Return the absolute path of an option's folder or file, or None; raise if there is none."""
    if path is not None and not path.exists():
        raise FileNotFoundError(f"Expected an existing folder for {option}, got {path}")
    return None if path is None else str(path.resolve())


def resolve_folder(option: str, folder: Path | None) -> str | None:
    """Return the absolute path of an option's folder, or None; raise if it does not exist."""
    if folder is not None and not folder.is_dir():
        raise NotADirectoryError(f"Expected an existing folder for {option}, got {folder}")
    return None if folder is None else str(folder.resolve())
