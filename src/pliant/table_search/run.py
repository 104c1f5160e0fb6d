"""Run a search: hand its short trainings to workers, log them, and build a table.

A search is a deterministic generator of requests, and all its randomness is addressed. To resume a
killed search, run it again: it repeats its requests, takes the results from the log as far as they
reach, and trains the rest.
"""

from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from hashlib import blake2b
from itertools import chain
from pathlib import Path

import numpy as np
from torch import nn

from pliant import __version__
from pliant.data import ImageDataset
from pliant.nn.pareto_table import ParetoTable, count_step_macs
from pliant.nn.sites import ElasticOptions
from pliant.nn.table_file import save_table
from pliant.params import Params, digest
from pliant.rng import derive_seed
from pliant.storage import atomic
from pliant.storage.run_dir import TABLE_FILE
from pliant.table_search.ask_tell import (
    SearchProblem,
    TrialLosses,
    TrialRequest,
    average_over_seeds,
    request_same_seeds,
)
from pliant.table_search.pareto import FloatArray, hypervolume
from pliant.table_search.search_space import make_search_space
from pliant.table_search.settings import SearchSettings
from pliant.table_search.short_training import (
    SearchContext,
    Trial,
    TrialOutcome,
    evaluate_on_proxy,
    make_search_context,
    run_short_training,
)
from pliant.table_search.snapshot import SNAPSHOT_PATTERN, load_or_train_snapshot
from pliant.table_search.table_rows import (
    build_table,
    fill_gaps,
    join_stages,
    select_monotone,
    thin_vectors,
)
from pliant.table_search.trial_log import TRIALS_FILE, TrialLog, read_trials
from pliant.value import Value, encode
from pliant.workers.pool import AnyWorkers, InlineWorkers, Pool, open_pool

CHUNK_PER_WORKER = 8  # trainings per worker between two writes of the log

InputFactory = Callable[[], tuple[nn.Module, ImageDataset]]


class SearchProgress(Value, frozen=True):
    """Progress of a search; the last one has the table."""

    phase: str  # corners, search, fresh, done
    trainings: int  # so far
    expected: int  # in all
    hypervolume: float  # of the front so far
    table: ParetoTable | None = None
    stage: int = 1  # of training at which the table is measured


def search(
    net: nn.Module,
    proxy: ImageDataset,
    settings: SearchSettings | None = None,
    *,
    workers: AnyWorkers | None = None,
    folder: str | Path | None = None,
    elastic_options: ElasticOptions | None = None,
) -> ParetoTable:
    """Find rate vectors that cost little and learn much, and return them as a table.

    Only proxy images are used. With a `folder`, every short training is logged there, the table is
    written there, and an interrupted search resumes from its log.

    >>> import torch
    >>> import pliant as pl
    >>> from pliant.table_search import UniformRates
    >>> images = pl.ImageDataset.from_tensors(torch.rand(40, 1, 28, 28), torch.arange(40) % 10)
    >>> short = pl.ShortTrainingSettings(batches=1, batch=8, seeds=1, snapshot_batches=1)
    >>> settings = pl.SearchSettings(
    ...     UniformRates(4), objective=short, corner_seeds=1, fresh_seeds=1, rows=2
    ... )
    >>> table = pl.search(pl.models.digits_cnn(), images, settings)
    >>> table.rates[-1]  # the full network is always there
    (0.0, 0.0)
    """
    *_, last = iter_search(
        net,
        proxy,
        settings,
        workers=workers,
        folder=None if folder is None else Path(folder),
        elastic_options=elastic_options,
    )
    assert last.table is not None
    return last.table


def iter_search(
    net: nn.Module,
    proxy: ImageDataset,
    settings: SearchSettings | None = None,
    *,
    workers: AnyWorkers | None = None,
    folder: Path | None = None,
    make_inputs: InputFactory | None = None,
    elastic_options: ElasticOptions | None = None,
) -> Iterator[SearchProgress]:
    """Search, and yield the progress after every chunk of short trainings.

    Worker processes call `make_inputs` to build the network and the proxy images themselves, where
    copying them would cost more.
    """
    settings = settings or SearchSettings()
    check_sides(net, proxy, settings, elastic_options)
    tables, contexts, equal_rates, trainings = [], [], [], 0
    for stage in range(len(settings.stages)):
        with open_search(
            net,
            proxy,
            settings,
            workers=workers,
            folder=folder,
            make_inputs=make_inputs,
            elastic_options=elastic_options,
            stage=stage,
        ) as run:
            run.trainings_before = trainings
            yield from run.measure_corners()
            front_vectors = yield from run.run_algorithm()
            tables.append((yield from run.measure_table(front_vectors)))
            contexts.append(run.trial_log.context)
            equal_rates.append((yield from run.measure_equal_rates()))
            trainings += len(run.requested)
    table = join_stages(tables, settings.stages)
    if folder is not None:
        # how it was made, without time or path: equal searches write equal files
        provenance = {
            "pliant": __version__,
            "search": encode(settings),
            "context": " ".join(contexts),
            "trainings": trainings,
            "equal_rates": equal_rates,  # by stage: cost as in the table, and gain
        }
        save_table(folder / TABLE_FILE, table, provenance)
    yield run.make_progress("done", table)


def check_sides(
    net: nn.Module, proxy: ImageDataset, settings: SearchSettings, options: ElasticOptions | None
) -> None:
    """Raise if the network cannot run on images of a side that is searched."""
    if settings.sides:
        context = make_search_context(net, proxy, settings.objective, options, check=False)
        make_search_space(context.net, settings.highest_rate, settings.sides, ())


def copy_trials(source_folder: Path, folder: Path) -> None:
    """Copy the short trainings of another search, for reuse where the objective is the same."""
    read_trials(source_folder / TRIALS_FILE)  # refuses another format
    paths = [source_folder / TRIALS_FILE, *sorted(source_folder.glob(SNAPSHOT_PATTERN))]
    contents = {path.name: path.read_bytes() for path in paths}
    for name, content in contents.items():
        atomic.write_bytes(folder / name, content)


@contextmanager
def open_search(
    net: nn.Module,
    proxy: ImageDataset,
    settings: SearchSettings,
    *,
    workers: AnyWorkers | None = None,
    folder: Path | None = None,
    make_inputs: InputFactory | None = None,
    elastic_options: ElasticOptions | None = None,
    stage: int = 0,
) -> Iterator["SearchState"]:
    """Start the workers of a search and read its log, at one of its stages.

    The other arguments are those of `iter_search`. The stages share the file of the log: what they
    measure has another context.
    """
    workers = workers or InlineWorkers()
    make_context = partial(make_search_context, net, proxy, settings.objective, elastic_options)
    get_context = cache(make_context)
    setup: Callable[[], SearchContext] = partial(make_context, check=False)  # checked here
    if isinstance(workers, InlineWorkers):
        setup = get_context  # shared with this process
    elif make_inputs is not None:
        setup = partial(_make_context, make_inputs, settings, elastic_options)
    with open_pool(workers, setup, run_short_training) as pool:
        context = get_context()
        if not context.net.sites:
            raise ValueError("Expected a network with filters to drop, found none")
        snapshot_params = load_or_train_snapshot(context, folder, settings.stages[stage])
        address = f"{context.digest} {digest(snapshot_params)}"
        log = TrialLog(blake2b(address.encode(), digest_size=16).hexdigest(), folder)
        with closing(log):
            yield SearchState(settings, context, snapshot_params, pool, log, stage)


def _make_context(
    make_inputs: InputFactory, settings: SearchSettings, options: ElasticOptions | None
) -> SearchContext:
    return make_search_context(*make_inputs(), settings.objective, options, check=False)


@dataclass
class SearchState:
    """A running search, or measurements with its settings."""

    settings: SearchSettings
    context: SearchContext
    snapshot_params: Params
    pool: Pool[Trial, TrialOutcome]
    trial_log: TrialLog
    stage: int = 0
    trainings_before: int = 0  # of other stages
    requested: set[Trial] = field(default_factory=set)
    points: list[tuple[float, float]] = field(default_factory=list)
    is_finished: bool = False  # nothing is left to train

    def __post_init__(self) -> None:
        settings, net = self.settings, self.context.net
        objective = settings.objective
        axes = (settings.highest_rate, settings.sides, settings.batch_shares)
        self.space = make_search_space(net, *axes)
        seed_count = max(settings.corner_seeds, objective.seeds)
        self.seeds = tuple(derive_seed(settings.seed, "short", n) for n in range(seed_count))
        # the same for every search with this objective, so that fronts can be compared
        self.fresh_seeds = tuple(
            derive_seed(objective.seed, "fresh", n) for n in range(settings.fresh_seeds)
        )
        genes = self.space.genes
        self.full_step = np.zeros(genes)
        self.cheapest_step = self.space.round(np.full((1, genes), settings.highest_rate))[0]
        self.min_step_cost = self.step_cost(self.cheapest_step)
        self.max_step_cost = self.step_cost(self.full_step)
        expected = settings.algorithm.count_trainings(genes, objective.seeds)
        expected += 2 * seed_count + settings.fresh_seeds * (settings.rows + settings.equal_rates)
        self.expected_trainings = expected * len(settings.stages)

    def step_cost(self, vector: FloatArray) -> float:
        """Return the MACs or the seconds of a training step."""
        settings, net, trial = self.settings, self.context.net, self.space.make_trial(vector, 0)
        step = (trial.rates, trial.side, trial.batch)
        if settings.cost == "seconds":
            assert settings.profile is not None
            return settings.profile.predict_seconds(net, *step)
        return count_step_macs(net, *step, settings.objective.choice)

    def compute_costs(self, vectors: FloatArray) -> FloatArray:
        """Return costs normalised to 0 for the cheapest step and 1 for the full one."""
        costs = np.array([self.step_cost(vector) for vector in self.space.round(vectors)])
        return (costs - self.min_step_cost) / (self.max_step_cost - self.min_step_cost)

    def make_progress(self, phase: str, table: ParetoTable | None = None) -> SearchProgress:
        points = np.array(self.points).reshape(-1, 2)
        done = self.trainings_before + len(self.requested)
        volume, expected = hypervolume(points[:, 0], points[:, 1]), self.expected_trainings
        return SearchProgress(phase, done, max(expected, done), volume, table, self.stage + 1)

    def measure_corners(self) -> Iterator[SearchProgress]:
        """Measure the full and the cheapest step, to which all losses are relative."""
        corners = np.stack([self.full_step, self.cheapest_step])
        yield from self.train_missing(request_same_seeds(corners, self.seeds), "corners")
        full, cheapest = (self._get_gains(vector, self.seeds).mean(axis=0) for vector in corners)
        # where dropout has no measurable cost, assume that of one image
        smallest = np.array([1 / len(self.context.eval_images), 1e-3])
        self.loss_scale = np.maximum(full - cheapest, smallest)  # of accuracy, and of -loss

    def run_algorithm(self) -> Generator[SearchProgress, None, FloatArray]:
        """Serve the algorithm's requests until it returns its front."""
        settings, space = self.settings, self.space
        problem = SearchProblem(
            space.genes,
            settings.highest_rate,
            self.compute_costs,
            self.seeds,
            settings.objective.seeds,
            settings.seed,
            space.level_counts,
        )
        algorithm = settings.algorithm.propose(problem)
        try:
            request = next(algorithm)
            while True:
                request = TrialRequest(space.round(request.vectors), request.seeds)
                yield from self.train_missing(request, "search")
                losses = self.normalise_losses(request)
                self.points += self.compute_points(request, losses)
                request = algorithm.send(losses)
        except StopIteration as stop:
            front_vectors: FloatArray = stop.value
            return space.round(front_vectors)

    def measure_table(
        self, front_vectors: FloatArray
    ) -> Generator[SearchProgress, None, ParetoTable]:
        """Measure the front at fresh seeds and build a table of it."""
        vectors = np.vstack([front_vectors, self.full_step, self.cheapest_step])
        vectors = np.unique(vectors, axis=0)
        vectors = thin_vectors(vectors, self.compute_costs(vectors), self.settings.rows)
        gains = yield from self.measure_gains(vectors)
        rows = select_monotone(vectors, self.compute_costs(vectors), gains)
        levels = len(self.space.level_counts)
        rows = fill_gaps(rows, self.settings.rows, self.compute_costs, levels)
        choice = self.settings.objective.choice
        return build_table(self.context.net, rows, self.space, choice, self.settings.profile)

    def measure_equal_rates(self) -> Generator[SearchProgress, None, list[tuple[float, float]]]:
        """Measure the same rate at all sites; return shares of the MACs and gains."""
        rates = np.linspace(self.settings.highest_rate, 0.0, self.settings.equal_rates)
        vectors = self.space.round(self.space.make_equal_vectors(rates))
        gains = yield from self.measure_gains(vectors)
        shares = [self._step_share(self.space.make_trial(vector, 0)) for vector in vectors]
        return list(zip(shares, gains.tolist(), strict=True))

    def measure_gains(self, vectors: FloatArray) -> Generator[SearchProgress, None, FloatArray]:
        """Return the mean gain of accuracy of each vector in short trainings at fresh seeds."""
        yield from self.train_missing(request_same_seeds(vectors, self.fresh_seeds), "fresh")
        start = evaluate_on_proxy(self.context, self.snapshot_params).accuracy
        accuracies = [self._get_gains(v, self.fresh_seeds)[:, 0].mean() for v in vectors]
        return np.array(accuracies) - start

    def measure_vectors(self, vectors: FloatArray, seeds: tuple[int, ...]) -> FloatArray:
        """Return the normalised cost and loss of each vector; measure the corners likewise."""
        self.seeds = seeds
        request = request_same_seeds(self.space.round(vectors), seeds)
        for _ in chain(self.measure_corners(), self.train_missing(request, "fresh")):
            pass
        points = self.compute_points(request, self.normalise_losses(request))
        return np.array(points).reshape(-1, 2)

    def repeat_trials(self) -> FloatArray:
        """Return cost and loss of every vector that a finished search tried, in its order."""
        self.is_finished = True
        for _ in chain(self.measure_corners(), self.run_algorithm()):
            pass
        return np.array(self.points).reshape(-1, 2)

    def train_missing(self, request: TrialRequest, phase: str) -> Iterator[SearchProgress]:
        """Run the trials of a request that are not in the log yet."""
        size = CHUNK_PER_WORKER * self.pool.count
        pairs = zip(*request, strict=True)
        all_trials = (self.space.make_trial(vector, s) for vector, seeds in pairs for s in seeds)
        trials = list(dict.fromkeys(all_trials))
        missing = [trial for trial in trials if trial not in self.trial_log.outcomes]
        if missing and self.is_finished:
            raise ValueError(f"Expected a finished search, found {len(missing)} trainings missing")
        self.requested.update(set(trials).difference(missing))
        for start in range(0, len(missing), size):
            chunk = missing[start : start + size]
            outcomes = self.pool.run(chunk, self.snapshot_params)
            for trial, outcome in zip(chunk, outcomes, strict=True):
                self.trial_log.put(trial, outcome, self._step_share(trial))
            self.requested.update(chunk)
            yield self.make_progress(phase)

    def _step_share(self, trial: Trial) -> float:
        """Return the MACs of a step as a share of the full network's."""
        net, choice = self.context.net, self.settings.objective.choice
        macs = count_step_macs(net, trial.rates, trial.side, trial.batch, choice)
        return macs / net.macs(net.full, training=True)

    def _get_gains(self, vector: FloatArray, seeds: tuple[int, ...]) -> FloatArray:
        """Return (seed, 2): accuracy and negative cross-entropy."""
        trials = [self.space.make_trial(vector, seed) for seed in seeds]
        outcomes = [self.trial_log.outcomes[trial] for trial in trials]
        return np.array([(outcome.accuracy, -outcome.loss) for outcome in outcomes])

    def compute_points(
        self, request: TrialRequest, losses: TrialLosses
    ) -> list[tuple[float, float]]:
        """Return the cost and the mean loss of each vector of a request."""
        costs = self.compute_costs(request.vectors).tolist()
        means = average_over_seeds(losses.accuracy).tolist()
        return list(zip(costs, means, strict=True))

    def normalise_losses(self, request: TrialRequest) -> TrialLosses:
        losses = [
            (self._get_gains(self.full_step, seeds) - self._get_gains(vector, seeds))
            / self.loss_scale
            for vector, seeds in zip(*request, strict=True)
        ]
        return TrialLosses([row[:, 0] for row in losses], [row[:, 1] for row in losses])
