"""`pliant bench profile`: time subnets, fit how long a step takes, and tell how far off that is."""

import statistics
from functools import partial
from pathlib import Path

import numpy as np
import torch

from pliant.cli.bench_elastic import stepping
from pliant.cli.timing import interleaved
from pliant.explore.pictures import draw_costs
from pliant.explore.profile import Profile, amounts, errors, fit
from pliant.nn.elastic import elastic
from pliant.nn.learner import Learner
from pliant.nn.models import INPUT_SHAPES, MODELS
from pliant.nn.optimiser import Sgd
from pliant.nn.subnet import Subnet
from pliant.params import params_of
from pliant.rng import stream
from pliant.value import Value


class Timed(Value, frozen=True):
    """One network's profile, and what it was fitted to."""

    network: str
    profile: Profile
    dropped: tuple[float, ...]  # share of all filters
    macs: tuple[float, ...]  # share of the full network's
    seconds: tuple[float, ...]


def measure(name: str, *, seconds: float, subnets: int, batch: int) -> Timed:
    """Time subnets in turn, fit half of them, and judge by the others."""
    torch.set_num_threads(1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = MODELS[name]()
        x = torch.randn(batch, *INPUT_SHAPES[name])
    labels = torch.arange(batch) % 2
    flexible = elastic(net, x[:1])
    rng = stream(0, "profile")
    chosen = [flexible.full]
    for number in range(1, subnets):
        # equal rates and mixed ones in turn, from nothing dropped to .5
        level = 0.5 * number / (subnets - 1)
        spread = rng.uniform(0, 0.5, len(flexible.sites)) if number % 2 else level
        rates = np.clip((np.full(len(flexible.sites), level) + spread) / 2, 0.0, 0.5)
        chosen.append(flexible.draw(rates, rng, "rounded"))
    work = {}
    for number, subnet in enumerate(chosen):
        learner = Learner(flexible, params_of(net), Sgd(lr=0.01))
        work[str(number)] = stepping(learner, partial(_same, subnet), x, labels)
    found = list(interleaved(work, seconds=seconds).values())
    costs = [amounts(flexible, subnet, batch) for subnet in chosen]
    profile = fit(costs[::2], found[::2], batch)
    error = statistics.median(errors(profile, costs[1::2], found[1::2]).tolist())
    whole = fit(costs, found, batch)
    total = sum(flexible.sizes)
    return Timed(
        name,
        Profile(whole.start, whole.per_mac, whole.per_byte, batch, error),
        tuple(1 - sum(subnet.counts) / total for subnet in chosen),
        tuple(macs / costs[0][0] for macs, _ in costs),
        tuple(found),
    )


def _same(subnet: Subnet, step: int) -> Subnet:
    return subnet


def draw(timed: Timed, path: Path) -> Path:
    """Draw MACs and time against the share of dropped filters."""
    times = np.asarray(timed.seconds)
    return draw_costs(
        path,
        np.asarray(timed.dropped),
        np.asarray(timed.macs),
        times / times[0],
        f"{timed.network}, batch {timed.profile.batch}, one thread",
    )
