"""`pliant bench`: measure pliant on this machine."""

import inspect
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from cyclopts import App

from pliant.cli import INTEGER
from pliant.value import Numbers

if TYPE_CHECKING:
    from pliant.bench.timing import Measurement

app = App(
    name="bench", help="Measure pliant on this machine.\n\nExample: pliant bench elastic resnet20"
)


@app.command
def elastic(
    *networks: str,
    seconds: float | None = None,
    memory: bool = True,
    limits: bool = False,
    json: bool = False,
) -> int:
    """Time training steps at several rates against plain networks, on one thread.

    Example: pliant bench elastic densenet40 femnist_cnn

    Args:
        networks: Bundled networks; by default all of them.
        seconds: Time to measure each network, by default 20, or each ratio, by default 3.
        memory: Also measure peak memory.
        limits: Only measure ratios that have a limit; exit code 1 if one is exceeded.
        json: Print JSON lines instead of a table.
    """
    from pliant.bench import elastic, elastic_limits
    from pliant.cli.progress import print_json, print_line
    from pliant.nn.models import MODELS
    from pliant.suggestions import did_you_mean
    from pliant.value import encode

    _check_seconds(seconds)
    for name in networks:
        if name not in MODELS:
            raise ValueError(f"unknown network {name!r}{did_you_mean(name, MODELS)}")
    if limits:
        if networks:
            raise ValueError(f"expected no networks with --limits, got {', '.join(networks)}")
        seconds = elastic_limits.SECONDS if seconds is None else seconds
        return _print_measurements(elastic_limits.measure_limits(seconds), json=json)
    for name in networks or tuple(MODELS):
        times = elastic.measure(name, 20.0 if seconds is None else seconds)
        peaks = elastic.measure_peak_memory(name) if memory else {}
        if json:
            print_json(encode(times) | {"peak_megabytes": peaks})
        else:
            print_line(times.format_table(peaks))
    return 0


@app.command
def engine(*, json: bool = False) -> int:
    """Measure the overhead of the engine; exit code 1 if a limit is exceeded.

    Example: pliant bench engine --json

    Args:
        json: Print JSON lines instead of a table.
    """
    from pliant.bench import engine

    return _print_measurements(engine.measure(), json=json)


def _print_measurements(measurements: "Iterator[Measurement]", *, json: bool) -> int:
    """Print measurements as they come; return 1 if a limit is exceeded."""
    from pliant.cli.progress import print_json, print_line
    from pliant.value import encode

    is_met = True
    for result in measurements:
        is_met = is_met and result.is_met
        if json:
            print_json(encode(result) | {"is_met": result.is_met})
        else:
            limit = "" if result.limit is None else f"  (limit {result.limit:g})"
            missed = "" if result.is_met else "  MISSED"
            line = f"{result.name:52} {result.value:9.3f} {result.unit:3}{limit}{missed}"
            print_line(line.rstrip())
    return 0 if is_met else 1


@app.command
def profile(
    network: str,
    *options: str,
    seconds: float = 30.0,
    subnets: Annotated[int, INTEGER] = 36,
    batch: Annotated[int, INTEGER] = 32,
    sizes: bool = False,
    out: Path | None = None,
    picture: Path | None = None,
    json: bool = False,
) -> None:
    """Fit the time of a training step on this machine: a + b · MACs + c · activation bytes.

    Example: pliant bench profile densenet19 --out profile.json --picture profile.png

    Example: pliant bench profile resnet20 width=8 --sizes --out step_time.json

    Args:
        network: A bundled network.
        options: key=value options of the network: numbers, or lists of them like filters=[6,12].
        seconds: Time to measure.
        subnets: Subnets to time; half of them are held out to estimate the error.
        batch: Samples per step.
        sizes: Also time smaller images and mini-batches, if the network takes them.
        out: JSON file for the profile, as `search.profile` and `step_time` expect it.
        picture: PNG or SVG file for a plot of MACs and time against the share of dropped filters.
        json: Print one JSON line with the times of all steps at full size.
    """
    from pliant.bench import profile
    from pliant.cli.progress import print_json, print_line
    from pliant.nn.models import MODELS
    from pliant.nn.models.initialisation import check_types
    from pliant.table_search.step_time import save_step_time_model

    if network not in MODELS:
        raise ValueError(f"Expected one of {', '.join(sorted(MODELS))}, got {network!r}")
    if subnets < 8 or batch < 1:
        raise ValueError(f"Expected >= 8 subnets and a batch >= 1, got {subnets} and {batch}")
    _check_seconds(seconds)
    for path in filter(None, (out, picture)):  # before measuring
        if path.is_dir():
            raise IsADirectoryError(f"{path}: expected a file to write, found a folder")
    numbers = dict(map(_parse_option, options))
    try:
        inspect.signature(MODELS[network]).bind(**numbers)
        check_types(MODELS[network], numbers)
        MODELS[network](**numbers)
    except (TypeError, ValueError) as error:
        raise ValueError(f"network {network}: {error}") from None
    fit = profile.measure(
        network, seconds=seconds, subnets=subnets, batch=batch, sizes=sizes, options=numbers
    )
    model = fit.profile
    if out is not None:
        save_step_time_model(out, model)
    if picture is not None:
        profile.draw_fit(fit).save(picture)
    if json:
        print_json(fit)
        return
    print_line(
        f"{network}, batch {batch}: {1e3 * model.start:.2f} ms + "
        f"{1e9 * model.per_mac:.4f} ns/MAC + {1e9 * model.per_byte:.3f} ns/byte; "
        f"held-out median error {model.error:.1%}"
    )


def _parse_option(text: str) -> tuple[str, Numbers]:
    """Return the name and the value of a key=value option."""
    key, _, value = text.partition("=")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
        return key.strip(), msgspec.convert(parsed, Numbers)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError):
        raise ValueError(f"Expected key=number or key=[numbers], got {text!r}") from None


def _check_seconds(seconds: float | None) -> None:
    if seconds is not None and not 0.0 < seconds < float("inf"):
        raise ValueError(f"Expected --seconds above 0, got {seconds:g}")
