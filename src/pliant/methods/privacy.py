"""Differential privacy for whole devices: clip each update, and add Gaussian noise to their sum.

McMahan, Ramage, Talwar, Zhang, "Learning differentially private recurrent language models", ICLR
2018. A round draws a fixed number of devices without replacement, whose loss of privacy is bounded
by Wang, Balle, Kasiviswanathan, "Subsampled Rényi differential privacy and analytical moments
accountant", AISTATS 2019, Theorem 27.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor

from pliant.extras import require
from pliant.methods.aggregation import (
    Updates,
    UpdateStream,
    Weighting,
    average_deltas,
    open_stream,
    weight_by,
)
from pliant.methods.base import Update
from pliant.methods.server_optimisers import ServerExtrapolation
from pliant.methods.verbs import Distils, Method, RunsAsynchronously
from pliant.nn.elastic import Elastic
from pliant.params import Params
from pliant.value import NonNegative, Positive, Value


class DevicePrivacy(Value, frozen=True):
    """Bound what the trained network reveals about any one device.

    Each delta is scaled down to the norm `clip`. The noise on the sum of a round's deltas has the
    standard deviation `noise` × `clip`. The guarantee is (epsilon, `delta`)-differential privacy
    against exchanging all data of one device; records have epsilon after every round.

    >>> import pliant as pl
    >>> pl.RunSettings(privacy=pl.DevicePrivacy(clip=0.5, noise=1.0)).privacy.delta
    1e-05
    """

    clip: Positive
    noise: NonNegative
    delta: Annotated[float, Meta(gt=0.0, lt=1.0)] = 1e-5


@runtime_checkable
class WeightsDeltas(Protocol):
    """By default a merge may use all that updates hold, in any way."""

    @property
    def delta_weighting(self) -> Weighting | None:
        """Return how a merge weights deltas, if it only steps along their mean; else None."""


def check_private_method(method: Method) -> None:
    """Raise if clipping and noise do not bound what a method's merge reveals."""
    kind = type(method).__name__
    if isinstance(method, RunsAsynchronously):
        raise ValueError(
            f"Expected a method with rounds with `privacy`, which draws the devices of each, got "
            f"{kind}, whose merges depend on who is fast"
        )
    if isinstance(getattr(method, "server", None), ServerExtrapolation):
        raise ValueError(
            "Expected another server optimiser with `privacy`, got ServerExtrapolation, whose step "
            "depends on the norm of every single update"
        )
    weighting = method.delta_weighting if isinstance(method, WeightsDeltas) else None
    if weighting is None or isinstance(method, Distils):
        raise ValueError(
            "Expected a method that merges by the mean of whole updates with `privacy`, as "
            f"clipping bounds no single coordinate, got {kind}, whose merge depends on more than "
            "their sum"
        )
    if weighting != "equal":
        raise ValueError(
            f'Expected equal weights with `privacy`, got {kind} weighted by "{weighting}": a '
            "device would count by more than its clipped update, and its weight tells of its data"
        )


def clip_delta(net: Elastic, update: Update, norm: float) -> Update:
    """Return an update with a delta of at most this norm, without norm statistics.

    Statistics and counters would need noise of their own, so the network keeps its first ones.
    """
    trained = {name: t for name, t in update.delta.items() if name in net.trainable_names}
    squares = sum(float(tensor.to(torch.float64).square().sum()) for tensor in trained.values())
    scale = norm / math.sqrt(squares) if squares > norm**2 else 1.0
    delta = {
        name: tensor.to(torch.float64) * scale if scale < 1 and name in trained
        else tensor if name in trained
        else torch.zeros_like(tensor)
        for name, tensor in update.delta.items()
    }  # fmt: skip
    return replace(update, delta=delta)


def draw_noise(params: Params, std: float, rng: np.random.Generator) -> Params:
    """Draw independent Gaussian noise for each entry of these tensors."""

    def draw(tensor: Tensor) -> Tensor:
        return torch.from_numpy(rng.normal(0.0, std, tuple(tensor.shape)))

    return {name: draw(tensor) for name, tensor in sorted(params.items())}


S = TypeVar("S", bound=Any)


def merge_privately(
    privacy: DevicePrivacy,
    net: Elastic,
    state: S,
    updates: Updates,
    merge: Callable[[S, Sequence[Update]], S],
    *,
    target: int,
    rng: np.random.Generator,
) -> S:
    """Return the state after merging the noisy mean of clipped updates as if it were one update.

    The sum is divided by the `target` number of updates, not by how many came: otherwise a single
    rejected update would change the weight of all others. Without updates nothing is merged.
    """
    stream = open_stream(updates)
    clipped = (clip_delta(net, update, privacy.clip) for update in stream)
    mean = average_deltas(
        net, state.params, UpdateStream(stream.planned, clipped), weight_by("equal")
    )
    count = len(stream.seen)
    if not count:
        return state
    if count != target:
        mean = {name: tensor * (count / target) for name, tensor in mean.items()}
    if privacy.noise:
        trained = {name: t for name, t in mean.items() if name in net.trainable_names}
        noise = draw_noise(trained, privacy.noise * privacy.clip / target, rng)
        mean = mean | {name: trained[name] + noise[name] for name in trained}
    return merge(state, [Update(0, mean, 1, 1, 1.0, 0.0)])


# Rényi orders; a quarter of the accountant's own, which take 0.2 s
_ORDERS = (1.1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 4.5, *range(5, 33), 40, 48, 64, 128, 256)


class Release(NamedTuple):
    """Rounds in which the same number of devices was drawn from as many."""

    population: int
    drawn: int
    rounds: int = 1


def add_release(releases: Sequence[Release], population: int, drawn: int) -> tuple[Release, ...]:
    """Return the rounds so far with one more.

    >>> add_release((Release(100, 10),), 100, 10)
    (Release(population=100, drawn=10, rounds=2),)
    """
    counts = {(release.population, release.drawn): release.rounds for release in releases}
    counts[population, drawn] = counts.get((population, drawn), 0) + 1
    return tuple(Release(*key, rounds) for key, rounds in counts.items())


def compute_epsilon(privacy: DevicePrivacy, releases: Sequence[Release]) -> float:
    """Return epsilon after these rounds; without noise it is infinite."""
    if not releases:
        return 0.0
    if not privacy.noise:
        return math.inf
    library = require_accountant()
    relation = library.NeighboringRelation.REPLACE_ONE
    accountant = library.rdp.RdpAccountant(_ORDERS, relation)
    # exchanging a device changes the sum by twice the clipping norm
    event = library.GaussianDpEvent(privacy.noise / 2)
    for population, drawn, rounds in releases:
        accountant.compose(
            library.SampledWithoutReplacementDpEvent(population, drawn, event), rounds
        )
    return float(accountant.get_epsilon(privacy.delta))


def require_accountant() -> Any:
    """Import the library that computes epsilon."""
    return require("dp_accounting", "privacy")
