"""`pliant bench profile`: time subnets, and fit and validate a model of the step time."""

import statistics
from collections.abc import Callable

import msgspec
import numpy as np
import torch

from pliant.analysis.style import ReportFigure, get_line_style, make_figure
from pliant.bench.elastic import make_elastic_step, make_inputs, make_trainer
from pliant.bench.timing import time_interleaved
from pliant.nn.elastic import Elastic, elastic
from pliant.nn.subnet import Subnet
from pliant.rng import rng_stream
from pliant.table_search.step_time import (
    StepTimeModel,
    compute_relative_errors,
    count_step_work,
    fit_step_time_model,
)
from pliant.value import Value


class StepTimeFit(Value, frozen=True):
    """The step-time model of one network, and the data it was fitted to."""

    network: str
    profile: StepTimeModel
    dropped: tuple[float, ...]  # share of all filters, for each subnet
    macs: tuple[float, ...]  # share of the full network's MACs
    seconds: tuple[float, ...]


def measure(name: str, *, seconds: float, subnets: int, batch: int) -> StepTimeFit:
    """Time subnets, fit all of them, and estimate the error of a fit to half on the other half."""
    net, x = make_inputs(name, batch)
    labels = torch.arange(batch) % 2
    elastic_net = elastic(net, x[:1], check=False)
    samples = _sample_subnets(elastic_net, subnets)

    def make_step(subnet: Subnet) -> Callable[[], object]:
        trainer = make_trainer(net, elastic_net)
        return make_elastic_step(trainer, lambda step: subnet, x, labels)

    steps = {str(number): make_step(subnet) for number, subnet in enumerate(samples)}
    times = list(time_interleaved(steps, seconds=seconds).values())
    costs = [count_step_work(elastic_net, subnet, batch) for subnet in samples]
    half_fit = fit_step_time_model(costs[::2], times[::2], batch)
    error = statistics.median(compute_relative_errors(half_fit, costs[1::2], times[1::2]).tolist())
    total = sum(elastic_net.sizes)
    return StepTimeFit(
        name,
        msgspec.structs.replace(fit_step_time_model(costs, times, batch), error=error),
        tuple(1 - sum(subnet.counts) / total for subnet in samples),
        tuple(macs / costs[0][0] for macs, _ in costs),
        tuple(times),
    )


def _sample_subnets(elastic_net: Elastic, count: int) -> list[Subnet]:
    """Return subnets at equal and mixed rates in turn, from 0 to .5."""
    rng = rng_stream(0, "profile")
    subnets = [elastic_net.full]
    for number in range(1, count):
        level = 0.5 * number / (count - 1)
        spread = rng.uniform(0, 0.5, len(elastic_net.sites)) if number % 2 else level
        rates = np.clip((np.full(len(elastic_net.sites), level) + spread) / 2, 0.0, 0.5)
        subnets.append(elastic_net.draw(rates, rng, "rounded"))
    return subnets


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
