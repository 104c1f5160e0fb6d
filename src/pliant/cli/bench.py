"""`pliant bench`: measure pliant against its limits on this machine."""

import platform
import sys
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
