"""pliant's own search: the front of a surrogate loss that is fitted to few short trainings.

The initial design sets every site to either end of its range in half of the vectors, so that each
short training informs about all sites; later vectors lie near the surrogate's front. The signal is
cross-entropy, which ranks vectors as accuracy does, with less noise. The result is the surrogate's
front, not the luckiest of the vectors tried.
"""

from functools import partial

import numpy as np

from pliant.rng import rng_stream
from pliant.table_search.ask_tell import (
    SearchGenerator,
    SearchProblem,
    TrialRequest,
    average_over_seeds,
)
from pliant.table_search.pareto import FloatArray, find_pareto_front
from pliant.table_search.search_space import list_levels, snap_levels
from pliant.table_search.surrogate import (
    Quadratic,
    fit_quadratic,
    minimise_trade_off,
    probe_quadratic,
)
from pliant.value import Count, Natural, NonNegative, Value

CostForms = dict[tuple[float, ...], Quadratic]  # of rates, by the values of the other genes

PRICES = np.geomspace(0.02, 50.0, 240)  # of cost in units of loss; both are about 1


class SurrogateSearch(Value, frozen=True, tag="fast"):
    """Find a front with a fraction of the short trainings that a genetic search needs."""

    per_site: Count = 4  # vectors in the initial design per site, and per side or batch share
    min_design: Count = 32  # vectors in the initial design, at least
    rounds: Natural = 2  # of refinement
    per_round: Count = 16  # vectors per round
    spread: NonNegative = 0.15  # of refined vectors around the front, as a share of the range
    vectors: Count = 24  # of the front

    def count_trainings(self, genes: int, seeds: int) -> int:
        return self._design_size(genes) + self.rounds * self.per_round

    def propose(self, problem: SearchProblem) -> SearchGenerator:
        """Fit the surrogate, sample near its front, and repeat."""
        costs = probe_costs(problem)
        points = make_design(self._design_size(problem.genes), problem.genes, problem.seed)
        losses = np.zeros(0)
        measured = np.zeros((0, problem.genes))
        for round_number in range(self.rounds + 1):
            points = snap_levels(points, problem.level_counts)
            reply = yield _make_request(problem, points, len(measured))
            measured = np.concatenate([measured, points])
            losses = np.concatenate([losses, average_over_seeds(reply.entropy)])
            fold_order = rng_stream(problem.seed, "folds", round_number).random(len(measured))
            loss = fit_quadratic(measured, losses, fold_order)
            points = self._sample_near_front(loss, costs, problem, round_number)
        return select_front_points(loss, costs, self.vectors) * problem.highest_rate

    def _design_size(self, genes: int) -> int:
        return max(self.min_design, self.per_site * genes)

    def _sample_near_front(
        self, loss: Quadratic, costs: CostForms, problem: SearchProblem, round_number: int
    ) -> FloatArray:
        """Return vectors of the front with noise added."""
        points = select_front_points(loss, costs, self.per_round + 2)[1:-1]
        noise = rng_stream(problem.seed, "around", round_number).uniform(-1, 1, points.shape)
        return np.clip(points + self.spread * noise, 0.0, 1.0)


def probe_costs(problem: SearchProblem) -> CostForms:
    """Return the cost as a form of the rates, for each combination of sides and shares.

    It is a product of all of them, which a single quadratic form would miss.
    """
    levels = list_levels(problem.level_counts)
    sites = problem.genes - len(problem.level_counts)

    def compute_cost(rates: FloatArray, values: tuple[float, ...]) -> FloatArray:
        return problem.cost(add_genes(rates, values) * problem.highest_rate) - 1.0

    return {
        values: probe_quadratic(partial(compute_cost, values=values), sites) for values in levels
    }


def add_genes(rates: FloatArray, values: tuple[float, ...]) -> FloatArray:
    """Append the same values to each vector of rates."""
    return np.hstack([rates, np.tile(values, (len(rates), 1))]) if values else rates


def make_design(count: int, sites: int, seed: int) -> FloatArray:
    """Return vectors of both ends, balanced for every site, and a sixth of them at equal rates.

    Where there are too few sites for that many such vectors, spread them over the whole range.
    """
    equal = np.linspace(0.0, 1.0, max(2, count // 6) + 1)[1:]
    mixed_count = count - len(equal)
    rng = rng_stream(seed, "design")
    is_few = 2**sites < count
    column = np.linspace(0.0, 1.0, mixed_count) if is_few else np.arange(mixed_count) % 2
    mixed = rng.permuted(np.repeat(column[:, None].astype(np.float64), sites, axis=1), axis=0)
    return np.concatenate([mixed, np.repeat(equal[:, None], sites, axis=1)])


def select_front_points(loss: Quadratic, cost_forms: CostForms, count: int) -> FloatArray:
    """Return points of a surrogate's front, evenly spaced in cost."""
    all_points, all_costs, all_losses = [], [], []
    for values, cost in cost_forms.items():
        rates = _trace_front(loss.fix_last(values), cost)
        all_points.append(add_genes(rates, values))
        all_costs.append(cost(rates))
        all_losses.append(loss.fix_last(values)(rates))
    front = find_pareto_front(np.concatenate(all_costs), np.concatenate(all_losses))
    points, costs = np.concatenate(all_points)[front], np.concatenate(all_costs)[front]
    targets = np.linspace(costs[0], costs[-1], count)
    nearest = [int(np.abs(costs - target).argmin()) for target in targets]
    return points[list(dict.fromkeys(nearest))]


def _trace_front(loss: Quadratic, cost: Quadratic) -> FloatArray:
    """Return the points of a front at all prices, both ends included."""
    points = minimise_trade_off(loss, cost, PRICES)
    points = np.concatenate([np.zeros_like(points[:1]), points, np.ones_like(points[:1])])
    return points[find_pareto_front(cost(points), loss(points))]


def _make_request(problem: SearchProblem, points: FloatArray, done_count: int) -> TrialRequest:
    """Request each vector once, at one seed after another."""
    seeds = [(problem.seeds[(done_count + n) % len(problem.seeds)],) for n in range(len(points))]
    return TrialRequest(points * problem.highest_rate, tuple(seeds))
