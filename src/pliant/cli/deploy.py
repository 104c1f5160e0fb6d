"""`pliant deploy`: the keys of a federation, and a whole one on this machine."""

import logging
import sys
from pathlib import Path
from typing import Literal

from cyclopts import App

HELP = """\
Make keys, and try a federation on this machine.

Example: pliant deploy up --devices 3"""

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

    made = make_keys(folder, devices=devices, hosts=host)
    sys.stdout.write("".join(f"{path}\n" for path in made))


@app.command
def up(
    spec: Path | None = None,
    *overrides: str,
    devices: int = 3,
    insecure: bool = False,
    port: int = 9092,
    out: Path | None = None,
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
        How many devices to start.
    insecure
        Neither TLS nor keys.
    port
        Port of the server on loopback.
    out
        Folder of the run; runs/NAME by default.
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

    from pliant.cli.server import need_devices, service_of, shown
    from pliant.deploy.federation import Federation
    from pliant.deploy.keys import make_keys
    from pliant.devices import Fleet
    from pliant.experiment import Experiment, load_experiment
    from pliant.methods import FedAvg

    if spec is None:
        experiment = Experiment(FedAvg(), Fleet(size=devices, round_seconds=30.0), rounds=3)
    else:
        experiment = load_experiment(spec, overrides)
    fleet = msgspec.structs.replace(experiment.fleet, size=devices)
    per_round = min(devices, experiment.per_round)
    experiment = msgspec.structs.replace(experiment, fleet=fleet, per_round=per_round)
    need_devices(experiment, devices)
    folder = out or Path("runs") / (spec.stem if spec else "deploy")
    keys = None if insecure else folder / "keys"
    if keys is not None and not keys.exists():
        make_keys(keys, devices=devices)
    logging.basicConfig(level=logging.WARNING, format="pliant: %(message)s")
    federation = Federation(
        experiment,
        folder,
        service=service_of(allowance, patience, squeeze, pace),
        port=port,
        keys=keys,
    )
    return shown(federation, experiment.rounds)
