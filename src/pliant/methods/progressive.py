"""Progressive training: start with cheap steps, end with full ones.

pliant's own method. Early in training a step on small images, or with few filters, costs a fraction
of a full one and teaches nearly as much, so a device makes several in the same time. Progressive
resizing is known from centralised training (Tan, Le: EfficientNetV2, ICML 2021; Touvron et al.:
Fixing the train-test resolution discrepancy, NeurIPS 2019), and growing networks from ProgFed (Wang
et al., ICML 2022).
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pliant.data import InputScale
from pliant.devices import BudgetPolicy, CostRows, PerBatch
from pliant.devices.vector_rng import IntArray
from pliant.methods.aggregation import (
    CoverageState,
    Updates,
    open_stream,
    silence_untrained,
    track_coverage,
)
from pliant.methods.base import (
    LocalTraining,
    Step,
    Task,
    TaskKey,
    TaskKeys,
    Update,
    make_step,
    train_locally,
)
from pliant.methods.filter_orders import Width, select_prefix
from pliant.methods.server_optimisers import AnyServerOptimiser, ServerSgd
from pliant.methods.table_methods import merge_updates
from pliant.nn.elastic import Elastic
from pliant.nn.filter_counts import count_prefix_filters
from pliant.nn.frozen_cost import count_unfrozen_macs, group_params
from pliant.nn.net_cache import cache_on_net
from pliant.nn.pareto_table import ParetoTable, Share, count_step_macs
from pliant.nn.subnet import Subnet
from pliant.nn.trainer import SubnetTrainer
from pliant.params import Params
from pliant.value import Count, Fraction, Natural, Value

log = logging.getLogger("pliant")

FULL_FROM = 0.8  # share of the run after which a ramp by table trains the full network


class Stage(Value, frozen=True):
    """What steps train in one part of a run.

    >>> import pliant as pl
    >>> pl.Stage(until=0.25, side=16).width
    1.0
    """

    until: Share = 1.0  # of the run
    side: Count | None = None  # of the images, in pixels; None: as they are
    width: Width = 1.0  # share of the filters, the first ones of every site
    batch: Share = 1.0  # share of the samples of a mini-batch
    frozen: Natural = 0  # number of layers, from the first on, that steps do not change

    def __post_init__(self) -> None:
        Value.__post_init__(self)
        if self.frozen and self.width < 1.0:
            raise ValueError(
                f"Expected a width of 1 with frozen layers, got {self.width:g} - at `$.width` of "
                "Stage"
            )


class StageRow(NamedTuple):
    """The steps of one stage, with a rate for each site of the network."""

    until: float
    rates: tuple[float, ...]
    side: int | None
    batch: float
    frozen: frozenset[str] = frozenset()


@dataclass(frozen=True)
class ProgressiveState(CoverageState):
    """The network, the filters trained so far, and the stage reached by stalling."""

    stage: int = 0
    losses: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))  # of it


class Progressive(Value, frozen=True, tag="progressive"):
    """Train in stages of rising cost, each for a share of the run.

    Devices make as many steps as fit into a round, up to `local.epochs` passes over their data.
    With `adapts`, a slow device uses the cheaper steps of earlier stages. Filters of later stages
    are silent until they join, so growing does not change what the network computes. With
    `patience`, a stage ends early if in so many rounds the training loss fell by less than
    `min_drop` of what it was in as many rounds before.

    With a `table` of several stages, each stage trains the row that gains most per second in the
    short trainings of that stage, or keeps the one before if that costs more. Seconds are those of
    the table, or else its MACs. The last fifth of the run trains the full network in any case.

    >>> import pliant as pl
    >>> stages = (pl.Stage(0.3, side=16), pl.Stage(0.6, side=24), pl.Stage())
    >>> pl.Progressive(stages=stages).local.epochs
    4
    """

    merges_stream: ClassVar[bool] = True

    stages: tuple[Stage, ...] = ()  # (): half and three quarters of the images' side, or width
    local: LocalTraining = LocalTraining(epochs=4)
    adapts: bool = False
    patience: Natural = 0  # rounds; 0: stages end when their share of the run is over
    min_drop: Fraction = 0.02
    merging: Literal["samples", "counts"] = "samples"
    server: AnyServerOptimiser = ServerSgd()
    table: ParetoTable | None = None  # of several stages, instead of `stages`

    def __post_init__(self) -> None:
        Value.__post_init__(self)
        if self.stages and self.table is not None:
            raise ValueError("Expected stages or a table, got both - at `$.table` of Progressive")
        ends = [stage.until for stage in self.stages]
        if ends and (ends[-1] != 1.0 or any(a >= b for a, b in pairwise(ends))):
            found = ", ".join(f"{end:g}" for end in ends)
            raise ValueError(
                f"Expected stages with rising `until`, the last 1, got {found} - at `$.stages` of "
                "Progressive"
            )

    def make_budget_policy(self, net: Elastic) -> BudgetPolicy:
        rows = CostRows(_compute_shares(net, self._list_rows(net), self.adapts))
        return PerBatch(rows, "as-written" if self.adapts else "unlimited")

    def limit_row(self, net: Elastic, state: ProgressiveState, progress: float) -> int:
        rows = self._list_rows(net)
        scheduled = sum(row.until <= progress for row in rows[:-1])
        return min(max(scheduled, state.stage), len(rows) - 1)

    def list_frozen(self, net: Elastic, row: int) -> frozenset[str]:
        return self._list_rows(net)[row].frozen

    def train(self, net: Elastic, task: Task, steps: Iterable[Step]) -> Update:
        train_step = make_step(task)

        def train_unfrozen(trainer: SubnetTrainer, step: Step) -> Tensor:
            trainer.freeze(self.list_frozen(net, step.row))
            return train_step(trainer, step)

        return train_locally(net, task, steps, self.local.optimiser, step_fn=train_unfrozen)

    def scale_inputs(self, net: Elastic, row: int) -> InputScale:
        stage_row = self._list_rows(net)[row]
        return InputScale(stage_row.side, stage_row.batch)

    def select_subnet(self, net: Elastic, row: int, key: TaskKey, step: int) -> Subnet:
        return select_prefix(net, self._list_rows(net)[row].rates)

    def count_filters(self, net: Elastic, rows: IntArray, keys: TaskKeys, step: int) -> IntArray:
        return count_prefix_filters(net, self._list_rates(net))[rows]

    def max_filters(self, net: Elastic) -> IntArray:
        return count_prefix_filters(net, self._list_rates(net))

    def init_state(self, params: Params) -> ProgressiveState:
        return ProgressiveState(params)

    def merge(self, net: Elastic, state: ProgressiveState, updates: Updates) -> ProgressiveState:
        stream = open_stream(updates)
        merged = merge_updates(self.server, net, state, stream, self.merging)
        grown = silence_untrained(net, track_coverage(merged, stream.seen))
        return self._watch_loss(grown, stream.seen) if self.patience and stream.seen else grown

    def _watch_loss(self, state: ProgressiveState, updates: Sequence[Update]) -> ProgressiveState:
        """Add the mean loss of a round; begin the next stage if it has stalled."""
        samples = sum(update.samples for update in updates)
        loss = sum(update.samples * update.loss for update in updates) / samples
        losses = torch.cat([state.losses, torch.tensor([loss], dtype=torch.float64)])
        recent, before = losses[-self.patience :], losses[-2 * self.patience : -self.patience]
        if len(before) < self.patience or recent.mean() < (1 - self.min_drop) * before.mean():
            return replace(state, losses=losses[-2 * self.patience :])
        return replace(state, stage=state.stage + 1, losses=losses[:0])

    def _list_rates(self, net: Elastic) -> tuple[tuple[float, ...], ...]:
        return tuple(row.rates for row in self._list_rows(net))

    def _list_rows(self, net: Elastic) -> tuple[StageRow, ...]:
        if self.table is not None:
            return _pick_rows(net, self.table)
        return _make_rows(net, self.stages or _make_default_stages(net))


@cache_on_net
def _make_default_stages(net: Elastic) -> tuple[Stage, ...]:
    """Return stages of 1/2 and 3/4 of the images' side, or of the width if their size is fixed."""
    shortest = min(net.program.input_shapes[0][1:], default=1)  # tokens have no side
    sides = [max(1, round(share * shortest)) for share in (0.5, 0.75)]
    try:
        for side in sides:
            net.at(side, side)
    except ValueError as error:
        log.info("progressive: grow in width, not in resolution: %s", str(error))
        return Stage(0.25, width=0.5), Stage(0.5, width=0.75), Stage()
    return Stage(0.25, side=sides[0]), Stage(0.5, side=sides[1]), Stage()


@cache_on_net
def _make_rows(net: Elastic, stages: tuple[Stage, ...]) -> tuple[StageRow, ...]:
    sites, layers = len(net.sites), group_params(net)
    most = max(stage.frozen for stage in stages)
    if most >= len(layers):
        raise ValueError(
            f"Expected fewer than the {len(layers)} layers of the network to be frozen, got {most}"
        )
    return tuple(
        StageRow(
            stage.until,
            (1.0 - stage.width,) * sites,
            stage.side,
            stage.batch,
            frozenset().union(*layers[: stage.frozen]),
        )
        for stage in stages
    )


@cache_on_net
def _pick_rows(net: Elastic, table: ParetoTable) -> tuple[StageRow, ...]:
    """Return the row of each stage that gains most per second, never a cheaper one than before."""
    table.check_network(net)
    if not table.gains:
        raise ValueError("Expected a table with gains, as `pliant search` writes it, got none")
    parts = table.split_stages()
    starts = [part.stages[0] if part.stages else 0.0 for part in parts]
    ends = [*starts[1:], 1.0]
    rows: list[StageRow] = []
    for part, until in zip(parts, ends, strict=True):
        rates = np.array(part.gains) / np.array(part.seconds or part.shares)
        best = int(rates.argmax())  # the first: the cheapest of equal ones
        row = StageRow(until, part.rates[best], *part.get_scale(best))
        if rows and _compute_share(net, row) < _compute_share(net, rows[-1]):
            row = rows[-1]._replace(until=until)
        rows.append(row)
        share, side = _compute_share(net, row), row.side or "full"
        log.info("progressive: until %g: %.3g of the MACs, side %s", until, share, side)
    if _compute_share(net, rows[-1]) < 1.0:  # the network will be used at full size
        rows[-1] = rows[-1]._replace(until=max(FULL_FROM, starts[-1]))
        rows.append(StageRow(1.0, (0.0,) * len(net.sites), None, 1.0))
    return tuple(rows)


@cache_on_net
def _compute_shares(net: Elastic, rows: tuple[StageRow, ...], adapts: bool) -> tuple[float, ...]:
    """Return the cost of each stage's steps, relative to full ones; only freezing may lower it."""
    shares = tuple(_compute_share(net, row) for row in rows)
    for before, after, row in zip(shares, shares[1:], rows[1:], strict=False):
        if before > after and (adapts or not row.frozen):
            found = ", ".join(f"{share:.3g}" for share in shares)
            reason = ", as slow devices use earlier ones" if row.frozen else ""
            raise ValueError(
                f"Expected stages of rising cost{reason}, got {found} of the full network's"
            )
    return shares


def _compute_share(net: Elastic, row: StageRow) -> float:
    full = net.macs(net.full, training=True)
    if row.frozen:
        sized = net if row.side is None else net.at(row.side, row.side)
        return row.batch * count_unfrozen_macs(sized, row.frozen) / full
    return count_step_macs(net, select_prefix(net, row.rates), row.side, row.batch) / full
