"""`pliant bench profile`: time subnets, and fit and validate a model of the step time."""

import statistics
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec
import numpy as np
import torch
import torch.nn.functional as F

from pliant.analysis.style import ReportFigure, get_line_style, make_figure
from pliant.bench.elastic import make_inputs, make_trainer
from pliant.bench.timing import time_interleaved
from pliant.data import AS_IS, InputScale
from pliant.nn.elastic import Elastic, elastic
from pliant.nn.subnet import Subnet
from pliant.rng import rng_stream
from pliant.table_search.step_time import (
    StepTimeModel,
    compute_relative_errors,
    count_step_work,
    fit_step_time_model,
)
from pliant.value import Numbers, Value

WIDTHS = (1.0, 0.875, 0.75, 0.625, 0.5)  # of prefixes


class StepTimeFit(Value, frozen=True):
    """The step-time model of one network, and the data it was fitted to."""

    network: str
    profile: StepTimeModel
    dropped: tuple[float, ...]  # share of all filters, for each subnet timed at full size
    macs: tuple[float, ...]  # share of the full network's MACs
    seconds: tuple[float, ...]


class _Sample(NamedTuple):
    """A kind of step to time."""

    net: Elastic  # for the size of its images
    subnet: Subnet
    scale: InputScale


def measure(
    name: str,
    *,
    seconds: float,
    subnets: int,
    batch: int,
    sizes: bool = False,
    options: Mapping[str, Numbers] | None = None,
) -> StepTimeFit:
    """Time subnets, fit all of them, and estimate the error of a fit to half on the other half.

    With `sizes`, the subnets are prefixes, and train on smaller images or mini-batches as well. The
    time of shrinking them counts.
    """
    net, x = make_inputs(name, batch, **(options or {}))
    labels = torch.arange(batch) % 2
    elastic_net = elastic(net, x[:1], check=False)
    draw = _draw_sizes if sizes else _draw_samples
    samples = draw(elastic_net, subnets)

    def make_step(sample: _Sample) -> Callable[[], object]:
        trainer = make_trainer(net, sample.net)

        def step() -> None:
            images, y = sample.scale.apply(x, labels)
            trainer.switch(sample.subnet)
            trainer.step(images, lambda output: F.cross_entropy(output, y))

        return step

    steps = {str(number): make_step(sample) for number, sample in enumerate(samples)}
    times = list(time_interleaved(steps, seconds=seconds).values())
    costs = [
        count_step_work(sample.net, sample.subnet, sample.scale.count_samples(batch))
        for sample in samples
    ]
    half_fit = fit_step_time_model(costs[::2], times[::2], batch)
    errors = compute_relative_errors(half_fit, costs[1::2], times[1::2])
    error = statistics.median(errors.tolist())
    total = sum(elastic_net.sizes)
    full_size = [number for number, sample in enumerate(samples) if sample.scale == AS_IS]
    return StepTimeFit(
        name,
        msgspec.structs.replace(fit_step_time_model(costs, times, batch), error=error),
        tuple(1 - sum(samples[number].subnet.counts) / total for number in full_size),
        tuple(costs[number][0] / costs[0][0] for number in full_size),
        tuple(times[number] for number in full_size),
    )


def _draw_samples(elastic_net: Elastic, count: int) -> list[_Sample]:
    """Return subnets at equal and mixed rates in turn, from 0 to .5."""
    rng = rng_stream(0, "profile")
    subnets = [elastic_net.full]
    for number in range(1, count):
        level = 0.5 * number / (count - 1)
        spread = rng.uniform(0, 0.5, len(elastic_net.sites)) if number % 2 else level
        rates = np.clip((np.full(len(elastic_net.sites), level) + spread) / 2, 0.0, 0.5)
        subnets.append(elastic_net.draw(rates, rng, "rounded"))
    return [_Sample(elastic_net, subnet, AS_IS) for subnet in subnets]


def _draw_sizes(elastic_net: Elastic, count: int) -> list[_Sample]:
    """Return prefixes of the filters, on mini-batches and, if possible, images of several sizes."""
    rng, full_side = rng_stream(0, "profile"), elastic_net.program.input_shapes[0][-1]
    least = full_side // 2
    try:
        elastic_net.at(least, least)
    except ValueError:  # it takes one size only
        least = full_side
    samples = [_Sample(elastic_net, elastic_net.full, AS_IS)]
    for number in range(1, count):
        # not by odd and even numbers, which are fitted and held out
        side = full_side if number % 4 > 1 else int(rng.integers(least, full_side + 1))
        width, batch = WIDTHS[rng.integers(len(WIDTHS))], 0.5 if number % 5 == 0 else 1.0
        net = elastic_net.at(side, side)
        samples.append(
            _Sample(
                net,
                net.select_prefix(1 - width),
                InputScale(None if net is elastic_net else side, batch),
            )
        )
    return samples


def draw_fit(result: StepTimeFit) -> ReportFigure:
    """Draw MACs and measured time of a step against the share of dropped filters."""
    times = tuple(seconds / result.seconds[0] for seconds in result.seconds)
    figure, axes = make_figure(4.0)
    for index, (name, values) in enumerate((("MACs", result.macs), ("step time, measured", times))):
        style = get_line_style(index) | {"linestyle": "none", "label": name}
        axes.plot(result.dropped, values, **style)
    axes.plot([0, 1], [1, 0], ":", linewidth=0.8, color="0.5")
    axes.set_xlim(0, 0.6)
    axes.set_ylim(0, 1.1)
    axes.set_xlabel("share of dropped filters")
    axes.set_ylabel("share of the full network's")
    title = f"{result.network}, batch {result.profile.batch}, one thread"
    axes.set_title(title, fontsize=8, loc="left")
    axes.legend(fontsize=8, frameon=False)
    text = "Scatter plot of MACs and step time against the share of dropped filters."
    rows = list(zip(result.dropped, result.macs, times, strict=True))
    return ReportFigure("step-costs", title, text, figure, ("dropped", "MACs", "seconds"), rows)
