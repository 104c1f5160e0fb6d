"""`pliant deploy`: the keys of a federation, and a whole one on this machine."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cyclopts import App

if TYPE_CHECKING:
    from pliant.deploy.host import Limits
    from pliant.experiment import Experiment

HELP = """\
Make keys, and try a federation on this machine.

Example: pliant deploy up --devices 3"""
BUILT_IN = {"method": {"type": "fedavg"}, "fleet": {"size": 3, "round_seconds": 30.0}, "rounds": 3}
LOCAL = "127.0.0.1"
MANY = 10  # devices, of some hundred MB each, that nobody starts by mistake

app = App(name="deploy", help=HELP, help_format="plaintext")


@app.command
def init(folder: Path, *, devices: int, host: tuple[str, ...] = ()) -> None:
    """Make a certificate authority, the server's certificate and a key for each device.

    Example: pliant deploy init keys --devices 3 --host example.org

    Parameters
    ----------
    folder
        A new folder. A device needs ca.crt and devices/NUMBER of it, and nothing else.
    devices
        How many devices there are.
    host
        Names and addresses of the server, beside those of this machine.
    """
    from pliant.extras import need

    need("cryptography", "deploy")
    from pliant.deploy.keys import make_keys

    need_some(devices)
    made = make_keys(folder, devices=devices, hosts=host)
    sys.stdout.write("".join(f"{path}\n" for path in made))


@app.command
def up(
    spec: Path | None = None,
    *overrides: str,
    devices: int | None = None,
    insecure: bool = False,
    port: int = 9092,
    out: Path | None = None,
    data: Path | None = None,
    code: Path | None = None,
    allowance: float = 15.0,
    patience: float = 120.0,
    squeeze: Literal["plain", "fp16", "int8", "topk"] = "plain",
    pace: Literal["measured", "fleet"] = "measured",
) -> int:
    """Run an experiment on real processes of this machine, with TLS and keys, and end them all.

    Example: pliant deploy up digits.toml --devices 3

    Parameters
    ----------
    spec
        The experiment's TOML file; without one, FedAvg on the embedded digits.
    overrides
        key=value in the place of what the file says.
    devices
        How many devices to start; by default `fleet.size` of the file, 3 without one.
    insecure
        Neither TLS nor keys.
    port
        Port of the server on loopback.
    out
        Folder of the run; runs/NAME by default.
    data
        Folder of the devices' data sets; by default the one that `pliant run` would take.
    code
        Folder of the Python files that the experiment may name; by default that of those it names.
    allowance
        Seconds for transport, beyond a device's own time; with a split method, seconds without a
        word from a device after which the round goes on without it.
    patience
        Seconds to wait for devices at the start; later rounds wait for `allowance`.
    squeeze
        How devices make their updates smaller.
    pace
        What devices follow: what they measure, or, to rehearse, the fleet of the file.
    """
    import msgspec

    from pliant.cli.server import need_devices, place, service_of, shown
    from pliant.deploy.federation import Federation, open_run, serving
    from pliant.deploy.keys import make_keys
    from pliant.experiment import load_experiment

    if devices is not None:
        need_some(devices)
    if spec is not None and "=" in spec.name and not spec.exists():
        spec, overrides = None, (str(spec), *overrides)
    experiment = load_experiment(spec, overrides) if spec else built_in(overrides, devices)
    said = experiment.fleet.size
    if devices is None and said > MANY:
        raise ValueError(f"Expected --devices N: fleet.size = {said} is many for one machine")
    size = devices or said
    fleet = msgspec.structs.replace(experiment.fleet, size=size)
    per_round = min(size, experiment.per_round)
    experiment = msgspec.structs.replace(experiment, fleet=fleet, per_round=per_round)
    need_devices(experiment, size)
    limits = limits_of(experiment, data, code)
    service = service_of(allowance, patience, squeeze, pace)
    folder = out or Path("runs") / (spec.stem if spec else "deploy")
    keys = None if insecure else folder / "keys"
    serving(experiment)(folder, service, port=port)  # what cannot be served leaves no folder
    open_run(folder, experiment)
    if keys is not None and not keys.exists():
        make_keys(keys, devices=size)
    federation = Federation(
        experiment, folder, service=service, port=port, keys=keys, limits=limits
    )
    if size != said:
        sys.stderr.write(f"taking --devices {size}, not fleet.size = {said}\n")
    return shown(federation, experiment, folder, place(LOCAL, port, keys))


def need_some(devices: int) -> None:
    """Refuse a federation without devices."""
    if devices < 1:
        raise ValueError(f"Expected --devices of 1 or more, got {devices}")


def built_in(overrides: Sequence[str], devices: int | None) -> "Experiment":
    """Return what runs where no file is given, with the command line's key=value in it."""
    from pliant.experiment import Experiment, overridden, resolved
    from pliant.value import decode

    fleet = {"fleet": {} if devices is None else {"size": devices}}
    raw = _over(_over(BUILT_IN, fleet), overridden(Path(os.devnull), overrides))
    return decode(resolved(raw, Path()), Experiment)


def _over(plain: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return plain data with what other data say in its place, table by table."""
    tables = {key for key, value in other.items() if isinstance(value, dict)}
    shared = {key for key in tables if isinstance(plain.get(key), dict)}
    return plain | other | {key: _over(plain[key], other[key]) for key in shared}


def limits_of(experiment: "Experiment", data: Path | None, code: Path | None) -> "Limits":
    """Return where devices of the same user on the same machine find what an experiment names."""
    from pliant.cli.device import need_folder
    from pliant.data.root import data_root
    from pliant.deploy.host import Limits
    from pliant.own import is_own

    root = need_folder("--data", data)
    if root is None:
        named = experiment.data.root
        root = str(data_root(None if named is None else Path(named)).resolve())
    names = [experiment.network.name, experiment.data.name]
    files = [Path(name.rpartition(":")[0]) for name in names if is_own(name)]
    folders = sorted({str(file.parent) for file in files if file.suffix == ".py"})
    allowed = need_folder("--code", code)
    if allowed is None and len(folders) > 1:
        raise ValueError(f"Expected --code FOLDER with all files, got {' and '.join(folders)}")
    return Limits(data=root, code=allowed or next(iter(folders), None))
