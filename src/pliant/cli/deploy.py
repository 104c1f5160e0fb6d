"""`pliant deploy`: make keys, or run a federation on this machine."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App

from pliant.cli import INTEGER

if TYPE_CHECKING:
    from pliant.deploy.device.host import Limits
    from pliant.deploy.settings import ServerSettings
    from pliant.experiment.config import Experiment

HELP = """\
Make keys, or run a federation on this machine.

Example: pliant deploy up --devices 3"""
DEFAULT_EXPERIMENT = {
    "method": {"type": "fedavg"},
    "fleet": {"size": 3, "round_seconds": 30.0},
    "rounds": 3,
}
LOOPBACK = "127.0.0.1"
MAX_IMPLICIT_DEVICES = 10  # each takes some hundred MB: more must be requested explicitly

app = App(name="deploy", help=HELP, help_format="plaintext")


@app.command
def init(folder: Path, *, host: tuple[str, ...] = ()) -> None:
    """Make a certificate authority and a server certificate.

    Example: pliant deploy init keys --host example.org

    Args:
        folder: A new folder, which stays on the server.
        host: Names and addresses of the server, in addition to those of this machine.
    """
    from pliant.extras import require

    require("cryptography", "deploy")
    from pliant.deploy.security.certificates import make_keys

    paths = make_keys(folder, hosts=host)
    sys.stdout.write("".join(f"{path}\n" for path in paths))


@app.command
def up(
    spec: Path | None = None,
    *overrides: str,
    devices: Annotated[int | None, INTEGER] = None,
    insecure: bool = False,
    port: Annotated[int, INTEGER] = 9092,
    out: Path | None = None,
    data: Path | None = None,
    code: Path | None = None,
    allowance: float = 15.0,
    patience: float = 120.0,
    pace: Literal["measured", "simulated"] = "measured",
    transport: Literal["flower", "grpc"] = "flower",
) -> int:
    """Run an experiment with a server and devices as processes on this machine.

    Example: pliant deploy up digits.toml --devices 3

    Args:
        spec: TOML file of the experiment; by default FedAvg on the bundled digits.
        overrides: key=value pairs that override the file.
        devices: Devices to start; by default `fleet.size` of the file, or 3 without a file.
        insecure: Use neither TLS nor keys.
        port: Port of the server, on loopback.
        out: Folder of the run; by default runs/NAME.
        data: Data folder of the devices; by default the one that `pliant run` uses.
        code: Folder of user code that devices may import; by default that of the files in the
            experiment.
        allowance: Seconds for transport, in addition to a device's own time; with a split method,
            seconds of silence after which the round continues without a device.
        patience: Seconds to wait for devices at the start; later rounds wait for `allowance`.
        pace: Let devices pace themselves by measured speed, or rehearse the simulation of the file.
        transport: What carries federated methods: Flower, or gRPC for rounds of less than some
            seconds. Split methods always use gRPC.
    """
    from pliant.cli import server
    from pliant.experiment.config import load_experiment

    check_device_count(1 if devices is None else devices)
    if spec is not None and "=" in spec.name and not spec.exists():
        spec, overrides = None, (str(spec), *overrides)
    described = (
        load_experiment(spec, overrides) if spec else make_default_experiment(overrides, devices)
    )
    limits = make_limits(described, data, code)
    settings = server.make_server_settings(allowance, patience, pace, transport)
    folder = out or Path("runs") / (spec.stem if spec else "deploy")
    keys = None if insecure else folder / "keys"
    return _run_federation(described, devices, folder, settings, limits, port, keys)


def _run_federation(
    described: "Experiment",
    devices: int | None,
    folder: Path,
    settings: "ServerSettings",
    limits: "Limits",
    port: int,
    keys: Path | None,
) -> int:
    from pliant.cli import server
    from pliant.deploy.logs import set_up_logging
    from pliant.deploy.messages import has_own_data
    from pliant.deploy.security.certificates import make_keys
    from pliant.deploy.supervise.federation import Federation, open_run, select_server_kind
    from pliant.deploy.supervise.server import ServerSupervisor

    experiment = resize_fleet(described, devices)
    size = experiment.fleet.size
    if has_own_data(experiment, settings.pace):
        raise ValueError(
            "Expected no `input` in [network]: `deploy up` shares out the [data] of the file; "
            "devices with their own data start with `pliant device --data`"
        )
    server.check_experiment(experiment, settings.pace)
    # Validate before creating the folder.
    kind = select_server_kind(experiment, settings.transport)
    ServerSupervisor(kind, folder, settings, port=port)
    open_run(folder, experiment)
    if keys is not None and not keys.exists():
        make_keys(keys)
    federation = Federation(
        experiment, folder, settings=settings, port=port, keys=keys, limits=limits
    )
    if size != described.fleet.size:
        sys.stderr.write(f"using --devices {size} instead of fleet.size = {described.fleet.size}\n")
    address = server.format_address(LOOPBACK, port, keys)
    set_up_logging("info")
    return server.show_rounds(federation, experiment, folder, address)


def resize_fleet(experiment: "Experiment", devices: int | None) -> "Experiment":
    """Return the experiment with a fleet of this many devices, by default its own number."""
    from msgspec.structs import replace

    size = devices or experiment.fleet.size
    if devices is None and size > MAX_IMPLICIT_DEVICES:
        raise ValueError(f"Expected --devices N: fleet.size = {size} is large for one machine")
    fleet = replace(experiment.fleet, size=size)
    return replace(experiment, fleet=fleet, per_round=min(size, experiment.per_round))


def check_device_count(devices: int) -> None:
    if devices < 1:
        raise ValueError(f"Expected --devices of 1 or more, got {devices}")


def make_default_experiment(overrides: Sequence[str], devices: int | None) -> "Experiment":
    """Return the experiment that runs without a file, with overrides applied."""
    from pliant.experiment.config import Experiment, read_toml, resolve_paths
    from pliant.value import decode

    fleet = {"fleet": {} if devices is None else {"size": devices}}
    sized = _merge_tables(DEFAULT_EXPERIMENT, fleet)
    raw = _merge_tables(sized, read_toml(Path(os.devnull), overrides))
    return decode(resolve_paths(raw, Path()), Experiment)


def _merge_tables(base: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Merge nested plain data; `overrides` wins."""
    tables = {key for key, value in overrides.items() if isinstance(value, dict)}
    shared = {key for key in tables if isinstance(base.get(key), dict)}
    return base | overrides | {key: _merge_tables(base[key], overrides[key]) for key in shared}


def make_limits(experiment: "Experiment", data: Path | None, code: Path | None) -> "Limits":
    """Return the folders in which devices on this machine find data and user code."""
    from pliant.cli.device import resolve_folder
    from pliant.data.download.cache import get_data_root
    from pliant.deploy.device.host import Limits
    from pliant.experiment.config import UserMethod
    from pliant.experiment.user_code import is_user_function

    root = resolve_folder("--data", data)
    if root is None:
        config_root = experiment.data.root
        root = str(get_data_root(None if config_root is None else Path(config_root)).resolve())
    names = [experiment.network.name, experiment.data.name]
    if isinstance(experiment.method, UserMethod):
        names.append(experiment.method.code)
    files = [Path(name.rpartition(":")[0]) for name in names if is_user_function(name)]
    folders = sorted({str(file.parent) for file in files if file.suffix == ".py"})
    code_folder = resolve_folder("--code", code)
    if code_folder is None and len(folders) > 1:
        raise ValueError(f"Expected --code FOLDER with all files, got {' and '.join(folders)}")
    return Limits(data=root, code=code_folder or next(iter(folders), None))
