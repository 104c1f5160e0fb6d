"""`pliant bench`: measure pliant against its limits on this machine."""

import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from cyclopts import App

if TYPE_CHECKING:
    from pliant.cli.bench_elastic import Measured

app = App(
    name="bench", help="Measure pliant on this machine.\n\nExample: pliant bench elastic resnet20"
)


@app.command
def elastic(*networks: str, seconds: float = 20.0, memory: bool = True, json: bool = False) -> None:
    """Time training steps at several rates against plain networks, interleaved, with one thread.

    Example: pliant bench elastic densenet40 femnist_cnn

    Parameters
    ----------
    networks
        Bundled networks; all of them where none is named.
    seconds
        How long to measure each.
    memory
        Measure peak memory too.
    json
        JSON lines instead of a table.
    """
    from pliant.cli import bench_elastic
    from pliant.hints import nearest
    from pliant.nn.models import MODELS

    unknown = [name for name in networks if name not in MODELS]
    if unknown:
        raise ValueError(f"unknown network {unknown[0]!r}{nearest(unknown[0], MODELS)}")
    for name in networks or tuple(MODELS):
        found = bench_elastic.measure(name, seconds)
        peaks = bench_elastic.peak(name) if memory else {}
        sys.stdout.write(_json(found, peaks) if json else _table(found, peaks))
        sys.stdout.flush()


@app.command
def engine(*, json: bool = False) -> int:
    """Measure what the engine costs beside training, each against its limit; 1 if one is missed.

    Example: pliant bench engine --json

    Parameters
    ----------
    json
        JSON lines instead of a table.
    """
    import msgspec

    from pliant.cli import bench_engine

    is_met = True
    for found in bench_engine.measure():
        is_met = is_met and found.is_met
        if json:
            plain = msgspec.to_builtins(found) | {"is_met": found.is_met}
            line = msgspec.json.encode(plain).decode()
        else:
            limit = "" if found.limit is None else f"  (limit {found.limit:g})"
            missed = "" if found.is_met else "  MISSED"
            line = f"{found.what:52} {found.value:9.3f} {found.unit:3}{limit}{missed}"
        sys.stdout.write(line.rstrip() + "\n")
        sys.stdout.flush()
    return 0 if is_met else 1


@app.command
def profile(
    network: str,
    *,
    seconds: float = 30.0,
    subnets: int = 36,
    batch: int = 32,
    out: Path | None = None,
    picture: Path | None = None,
    json: bool = False,
) -> None:
    """Fit how long a training step takes on this machine: a + b · MACs + c · activation bytes.

    Example: pliant bench profile densenet19 --out profile.json --picture profile.png

    Parameters
    ----------
    network
        A bundled network.
    seconds
        How long to measure.
    subnets
        How many subnets to time; half of them are left out of the fit that is judged.
    batch
        Samples in a step.
    out
        A JSON file for the profile: what `search.profile` takes.
    picture
        A PNG or SVG of MACs and time against the share of dropped filters.
    json
        One JSON line with all times.
    """
    import msgspec

    from pliant import atomic
    from pliant.cli import bench_profile
    from pliant.nn.models import MODELS

    if network not in MODELS:
        raise ValueError(f"Expected one of {', '.join(sorted(MODELS))}, got {network!r}")
    if subnets < 8 or batch < 1:
        raise ValueError(f"Expected 8 subnets or more and a batch, got {subnets} and {batch}")
    found = bench_profile.measure(network, seconds=seconds, subnets=subnets, batch=batch)
    if out is not None:
        atomic.write_bytes(out, msgspec.json.encode(found.profile) + b"\n")
    if picture is not None:
        bench_profile.draw(found, picture)
    fitted = found.profile
    line = (
        f"{network}, batch {batch}: {1e3 * fitted.start:.2f} ms + "
        f"{1e9 * fitted.per_mac:.4f} ns/MAC + {1e9 * fitted.per_byte:.3f} ns/byte; "
        f"held-out median error {fitted.error:.1%}"
    )
    sys.stdout.write((msgspec.json.encode(found).decode() if json else line) + "\n")


def _table(found: "Measured", peaks: dict[str, float]) -> str:
    rows = [f"{found.network}: {found.macs / 1e6:.2f} M MACs, batch 32, {platform.processor()}"]
    rows += [f"  {name:44} {value:9.2f} ms" for name, value in found.milliseconds.items()]
    rows += [f"  {name:44} {value:9.3f}" for name, value in found.ratios.items()]
    if peaks:
        ratio = peaks["elastic"] / peaks["plain"]
        rows.append(
            f"  {'peak memory at .5 / plain, batch 128':44} {ratio:9.3f}"
            f"  ({peaks['elastic']:.0f} of {peaks['plain']:.0f} MB)"
        )
    return "\n".join(rows) + "\n"


def _json(found: "Measured", peaks: dict[str, float]) -> str:
    import msgspec

    plain = msgspec.to_builtins(found) | {"peak_megabytes": peaks}
    return msgspec.json.encode(plain).decode() + "\n"
