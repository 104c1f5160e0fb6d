"""`pliant bench profile`: time subnets, and fit and validate a model of the step time."""

import statistics
from functools import partial
from pathlib import Path

import numpy as np
import torch

from pliant.analysis.search_plots import draw_step_costs
from pliant.bench.elastic import make_elastic_step
from pliant.bench.timing import time_interleaved
from pliant.nn.elastic import Elastic, elastic
from pliant.nn.models import INPUT_SHAPES, MODELS
from pliant.nn.optimisers import Sgd
from pliant.nn.subnet import Subnet
from pliant.nn.trainer import SubnetTrainer
from pliant.params import get_params
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
    torch.set_num_threads(1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = MODELS[name]()
        x = torch.randn(batch, *INPUT_SHAPES[name])
    labels = torch.arange(batch) % 2
    elastic_net = elastic(net, x[:1])
    samples = _sample_subnets(elastic_net, subnets)
    steps = {}
    for number, subnet in enumerate(samples):
        trainer = SubnetTrainer(elastic_net, get_params(net), Sgd(lr=0.01))
        steps[str(number)] = make_elastic_step(trainer, partial(_return_subnet, subnet), x, labels)
    times = list(time_interleaved(steps, seconds=seconds).values())
    costs = [count_step_work(elastic_net, subnet, batch) for subnet in samples]
    half_fit = fit_step_time_model(costs[::2], times[::2], batch)
    error = statistics.median(compute_relative_errors(half_fit, costs[1::2], times[1::2]).tolist())
    full_fit = fit_step_time_model(costs, times, batch)
    total = sum(elastic_net.sizes)
    return StepTimeFit(
        name,
        StepTimeModel(full_fit.start, full_fit.per_mac, full_fit.per_byte, batch, error),
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


def _return_subnet(subnet: Subnet, step: int) -> Subnet:
    return subnet


def draw_fit(result: StepTimeFit, path: Path) -> Path:
    """Draw MACs and time against the share of dropped filters."""
    times = np.asarray(result.seconds)
    return draw_step_costs(
        path,
        np.asarray(result.dropped),
        np.asarray(result.macs),
        times / times[0],
        f"{result.network}, batch {result.profile.batch}, one thread",
    )
