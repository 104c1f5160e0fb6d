"""Search: short trainings handed to workers, remembered, and made into a table.

Every search is a generator that asks for short trainings and is sent what they came to; all that is
random has an address. So a search that was killed is simply run again: it asks the same questions,
finds the answers that are on record, and goes on where they end.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from pliant import __version__, atomic, checkpoint
from pliant.data import Images
from pliant.engine.trials import NAME, Trials
from pliant.engine.workers import AnyWorkers, Inline, Pool, opened
from pliant.explore.exploration import Exploration
from pliant.explore.front import FloatArray, hypervolume
from pliant.explore.objective import Bench, Objective, Outcome, Trial, bench, judge, short_training
from pliant.explore.objective import snapshot as take_snapshot
from pliant.explore.problem import Answer, Ask, Problem, same_seeds
from pliant.explore.rows import filled, monotone, rounded
from pliant.explore.table import Table, described
from pliant.explore.table_file import save_table
from pliant.nn.elastic import Elastic
from pliant.params import Params, digest
from pliant.rng import number
from pliant.value import Value, encode

TABLE = "table.safetensors"
SNAPSHOT = "snapshot.ckpt"
CHUNK = 8  # jobs a worker between two writes of the record

Source = Callable[[], tuple[nn.Module, Images]]


class Progress(Value, frozen=True):
    """How far a search is; the last one has the table."""

    stage: str  # corners, search, fresh, done
    trainings: int  # asked for so far
    expected: int  # in all
    hypervolume: float  # of what was found so far
    table: Table | None = None


def search(
    net: nn.Module,
    proxy: Images,
    how: Exploration | None = None,
    *,
    workers: AnyWorkers | None = None,
    folder: Path | None = None,
) -> Table:
    """Find rate vectors that cost little and learn much, and return them as a table.

    Only proxy images are looked at. With a `folder`, every short training is recorded there and the
    table written; a search that was interrupted goes on from its records.

    >>> import torch
    >>> import pliant as pl
    >>> from pliant.explore import Uniform
    >>> images = pl.Images.from_tensors(torch.rand(40, 1, 28, 28), torch.arange(40) % 10)
    >>> short = pl.Objective(batches=1, batch=8, seeds=1, snapshot_batches=1)
    >>> how = pl.Exploration(Uniform(4), objective=short, normalisers=1, fresh=1, rows=2)
    >>> table = pl.search(pl.models.digits_cnn(), images, how)
    >>> table.rates[-1]  # the full network is always there
    (0.0, 0.0)
    """
    *_, last = explore(net, proxy, how, workers=workers, folder=folder)
    assert last.table is not None
    return last.table


def explore(
    net: nn.Module,
    proxy: Images,
    how: Exploration | None = None,
    *,
    workers: AnyWorkers | None = None,
    folder: Path | None = None,
    source: Source | None = None,
) -> Iterator[Progress]:
    """Search, and yield how far it is after every batch of short trainings.

    `source` makes the network and the proxy images anew in a worker process, where copying them
    there would cost more.
    """
    how = how or Exploration()
    setup = partial(_set_up, source or partial(_given, net, proxy), how.objective)
    with opened(workers or Inline(), setup, short_training) as pool:
        run = _begun(net, proxy, how, pool, folder)
        with closing(run.trials):
            yield from run.corners()
            found = yield from run.searched()
            table = yield from run.tabulated(found)
            if folder is not None:
                save_table(folder / TABLE, table, _provenance(run))
            yield run.progress("done", table)


def measured(
    net: nn.Module,
    proxy: Images,
    how: Exploration,
    vectors: FloatArray,
    seeds: tuple[int, ...],
    *,
    workers: AnyWorkers | None = None,
    folder: Path | None = None,
    source: Source | None = None,
) -> FloatArray:
    """Return cost and loss, both normalised, of vectors at seeds of one's choice: a judgement.

    The corners are measured at the same seeds. Row by row as the vectors were given.
    """
    setup = partial(_set_up, source or partial(_given, net, proxy), how.objective)
    with opened(workers or Inline(), setup, short_training) as pool:
        run = _begun(net, proxy, how, pool, folder)
        with closing(run.trials):
            run.seeds = seeds
            for _ in run.corners():
                pass
            ask = same_seeds(rounded(vectors), seeds)
            for _ in run.train(_trials(ask.vectors, ask), "fresh"):
                pass
            losses = [float(row.mean()) for row in run.answer(ask.vectors, ask).accuracy]
            return np.column_stack([run.cost(ask.vectors), losses])


def tried(net: nn.Module, proxy: Images, how: Exploration, folder: Path) -> FloatArray:
    """Return cost and loss of all that the search in a folder has tried, in its order."""
    with opened(Inline(), _nothing, short_training) as pool:
        run = _begun(net, proxy, how, pool, folder)
        with closing(run.trials):
            for _ in run.corners():
                pass
            search = run.searched()
            for _ in search:
                pass
            return np.array(run.points).reshape(-1, 2)


def borrow(records: Path, folder: Path) -> None:
    """Give a new search the short trainings of another: those of its objective will be of use."""
    found = {name: (records / name).read_bytes() for name in (SNAPSHOT, NAME)}
    for name, content in found.items():
        atomic.write_bytes(folder / name, content)


def _nothing() -> Any:
    return None


def _begun(
    net: nn.Module,
    proxy: Images,
    how: Exploration,
    pool: Pool[Trial, Outcome],
    folder: Path | None,
) -> "_Run":
    at = bench(net, proxy, how.objective)
    if not at.net.sites:
        raise ValueError("Expected a network with filters to drop, found none")
    start = _snapshot(at, folder)
    context = blake2b(f"{at.context} {digest(start)}".encode(), digest_size=16).hexdigest()
    return _Run(how, at, start, pool, Trials(context, folder))


def _given(net: nn.Module, proxy: Images) -> tuple[nn.Module, Images]:
    return net, proxy


def _set_up(source: Source, objective: Objective) -> Bench:
    return bench(*source(), objective)


def _snapshot(at: Bench, folder: Path | None) -> Params:
    """Return the snapshot that is on disk, if it is whole and of this bench, or a new one."""
    path = None if folder is None else folder / SNAPSHOT
    if path is not None and path.exists():
        try:
            found, state = checkpoint.load(path)
        except checkpoint.CorruptCheckpoint:
            state = None
        if state == at.context:
            return found
    made = take_snapshot(at)
    if folder is not None:
        atomic.write_bytes(folder / SNAPSHOT, checkpoint.to_bytes(made, at.context))
    return made


@dataclass
class _Run:
    """A search under way."""

    how: Exploration
    at: Bench
    start: Params
    pool: Pool[Trial, Outcome]
    trials: Trials
    asked: set[Trial] = field(default_factory=set)
    points: list[tuple[float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        how, net = self.how, self.at.net
        count = max(how.normalisers, how.objective.seeds)
        self.seeds = tuple(number(how.seed, "short", place) for place in range(count))
        # the same for every search with this objective, so that fronts can be compared
        self.fresh = tuple(number(how.objective.seed, "fresh", n) for n in range(how.fresh))
        self.full = np.zeros(len(net.sites))
        self.highest = rounded(np.full(len(net.sites), how.highest))
        self.price = _price(how, net)
        self.least, self.most = self.price(self.highest), self.price(self.full)
        self.expected = how.by.trainings(len(net.sites), how.objective.seeds)
        self.expected += 2 * count + how.fresh * how.rows

    def cost(self, vectors: FloatArray) -> FloatArray:
        """Return costs between 0, at the highest rates, and 1, of the full network."""
        prices = np.array([self.price(vector) for vector in rounded(vectors)])
        return (prices - self.least) / (self.most - self.least)

    def share(self, rates: Sequence[float]) -> float:
        """Return the expected MACs of a training step as a share of the full network's."""
        net = self.at.net
        return net.macs(rates, training=True) / net.macs(0.0, training=True)

    def progress(self, stage: str, table: Table | None = None) -> Progress:
        """Return how far the search is."""
        points = np.array(self.points).reshape(-1, 2)
        done = len(self.asked)
        volume = hypervolume(points[:, 0], points[:, 1])
        return Progress(stage, done, max(self.expected, done), volume, table)

    def corners(self) -> Iterator[Progress]:
        """Measure the full network and the highest rates: what all else is compared with."""
        wanted = [
            Trial(tuple(v.tolist()), s) for v in (self.full, self.highest) for s in self.seeds
        ]
        yield from self.train(wanted, "corners")
        found = np.array([self._gains(v, self.seeds) for v in (self.full, self.highest)])
        spread = found[0].mean(axis=0) - found[1].mean(axis=0)  # of accuracy, and of -loss
        # where dropout costs nothing that could be seen, one image is what it costs
        least = np.array([1 / len(self.at.after), 1e-3])
        self.spread = np.maximum(spread, least)

    def searched(self) -> Generator[Progress, None, FloatArray]:
        """Let the algorithm ask until it has its front."""
        problem = Problem(
            len(self.at.net.sites),
            self.how.highest,
            self.cost,
            self.seeds,
            self.how.objective.seeds,
            self.how.seed,
        )
        proposal = self.how.by.propose(problem)
        try:
            ask = next(proposal)
            while True:
                vectors = rounded(ask.vectors)
                yield from self.train(_trials(vectors, ask), "search")
                answer = self.answer(vectors, ask)
                means = [float(row.mean()) for row in answer.accuracy]
                self.points += zip(self.cost(vectors).tolist(), means, strict=True)
                ask = proposal.send(answer)
        except StopIteration as end:
            found: FloatArray = end.value
            return rounded(found)

    def tabulated(self, found: FloatArray) -> Generator[Progress, None, Table]:
        """Measure the front at fresh seeds and make a table of it."""
        vectors = np.unique(np.concatenate([found, self.full[None], self.highest[None]]), axis=0)
        vectors = _thinned(vectors, self.cost(vectors), self.how.rows)
        yield from self.train(
            [Trial(tuple(v.tolist()), s) for v in vectors for s in self.fresh], "fresh"
        )
        start = judge(self.at, self.start).accuracy
        gains = np.array([self._gains(v, self.fresh)[:, 0].mean() - start for v in vectors])
        rows = filled(monotone(vectors, self.cost(vectors), gains), self.how.rows, self.cost)
        return _table(self.how, self.at.net, rows.vectors, rows.gains)

    def train(self, wanted: list[Trial], stage: str) -> Iterator[Progress]:
        """Make sure that these trials are known."""
        wanted = list(dict.fromkeys(wanted))
        step = CHUNK * self.pool.count
        missing = [trial for trial in wanted if self.trials.get(trial) is None]
        self.asked.update(set(wanted).difference(missing))
        for place in range(0, len(missing), step):
            part = missing[place : place + step]
            for trial, outcome in zip(part, self.pool.run(part, self.start), strict=True):
                self.trials.put(trial, outcome, self.share(trial.rates))
            self.asked.update(part)
            yield self.progress(stage)

    def _gains(self, vector: FloatArray, seeds: tuple[int, ...]) -> FloatArray:
        """Return (seed, 2): accuracy, and cross-entropy with its sign changed."""
        rates = tuple(vector.tolist())
        found = []
        for seed in seeds:
            outcome = self.trials.get(Trial(rates, seed))
            assert outcome is not None
            found.append((outcome.accuracy, -outcome.loss))
        return np.array(found)

    def answer(self, vectors: FloatArray, ask: Ask) -> Answer:
        losses = [
            (self._gains(self.full, seeds) - self._gains(vector, seeds)) / self.spread
            for vector, seeds in zip(vectors, ask.seeds, strict=True)
        ]
        return Answer([row[:, 0] for row in losses], [row[:, 1] for row in losses])


def _trials(vectors: FloatArray, ask: Ask) -> list[Trial]:
    return [
        Trial(tuple(vector.tolist()), seed)
        for vector, seeds in zip(vectors, ask.seeds, strict=True)
        for seed in seeds
    ]


def _price(how: Exploration, net: Elastic) -> Callable[[FloatArray], float]:
    """Return what a training step costs: MACs per sample, or seconds."""
    if how.cost == "macs":
        return partial(net.macs, training=True)
    assert how.profile is not None
    return partial(how.profile.seconds, net)


def _thinned(vectors: FloatArray, costs: FloatArray, count: int) -> FloatArray:
    """Keep so many vectors, spread evenly over the costs, with both ends."""
    order = np.argsort(costs, kind="stable")
    if len(order) <= count:
        return vectors[order]
    kept = {0, len(order) - 1}
    for wanted in np.linspace(costs[order[0]], costs[order[-1]], count)[1:-1].tolist():
        left = [place for place in range(len(order)) if place not in kept]
        kept.add(min(left, key=lambda place: abs(float(costs[order[place]]) - wanted)))
    return vectors[order[sorted(kept)]]


def _table(how: Exploration, net: Elastic, vectors: FloatArray, gains: FloatArray) -> Table:
    """Make a table of rows that rise in the cost that was searched for, and in the other one."""
    full = net.macs(0.0, training=True)
    shares = [net.macs(vector, training=True) / full for vector in vectors]
    seconds = [how.profile.seconds(net, vector) if how.profile else 0.0 for vector in vectors]
    kept = [len(vectors) - 1]  # the full network: the dearest in both
    for place in reversed(range(len(vectors) - 1)):
        if shares[place] <= shares[kept[0]] and seconds[place] <= seconds[kept[0]]:
            kept.insert(0, place)
    return Table(
        net.fingerprint,
        tuple(tuple(vectors[place].tolist()) for place in kept),
        tuple(shares[place] for place in kept),
        tuple(float(gains[place]) for place in kept),
        tuple(seconds[place] for place in kept) if how.profile else (),
        described(net),
        full,
    )


def _provenance(run: _Run) -> dict[str, object]:
    """Tell where a table came from; the same search tells the same, so no time and no place."""
    return {
        "pliant": __version__,
        "search": encode(run.how),
        "context": run.trials.context,
        "trainings": len(run.asked),
    }
