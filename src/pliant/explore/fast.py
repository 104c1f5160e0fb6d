"""pliant's own search: a surrogate of the loss, fitted to few short trainings, gives the front.

A first design sets every site to both ends of its range in half of its vectors, so that each short
training tells about all sites; later ones lie along the front that the surrogate sees. The signal
is cross-entropy, which ranks vectors as accuracy does, with less noise. What comes out is the
surrogate's front, not the luckiest of the vectors that were tried.
"""

import numpy as np

from pliant.explore.front import FloatArray, front
from pliant.explore.problem import Answer, Ask, Problem, Proposal
from pliant.explore.surrogate import Quadratic, fitted, probed, trade_off
from pliant.rng import stream
from pliant.value import Count, Natural, NonNegative, Value

PRICES = np.geomspace(0.02, 50.0, 240)  # of cost in units of loss: both are about 1


class Fast(Value, frozen=True, tag="fast"):
    """A front for a fraction of the short trainings that a genetic search takes."""

    per_site: Count = 4  # vectors of the first design for each site
    least: Count = 32  # vectors of the first design
    rounds: Natural = 2  # of refinement
    refined: Count = 16  # vectors a round
    spread: NonNegative = 0.15  # of refined vectors around the front, in parts of the range
    vectors: Count = 24  # of the front

    def trainings(self, sites: int, seeds: int) -> int:
        """Return how many short trainings it takes: one a vector."""
        return self._first(sites) + self.rounds * self.refined

    def propose(self, problem: Problem) -> Proposal:
        """Fit, look along the front, fit again."""
        cost = probed(lambda points: problem.cost(points * problem.highest) - 1.0, problem.sites)
        points = design(self._first(problem.sites), problem.sites, problem.seed)
        losses = np.zeros(0)
        known = np.zeros((0, problem.sites))
        for number in range(self.rounds + 1):
            answer = yield _ask(problem, points, len(known))
            known = np.concatenate([known, points])
            losses = np.concatenate([losses, _signal(answer)])
            order = stream(problem.seed, "folds", number).random(len(known))
            loss = fitted(known, losses, order)
            points = self._around(loss, cost, problem, number)
        return chosen(loss, cost, self.vectors) * problem.highest

    def _first(self, sites: int) -> int:
        return max(self.least, self.per_site * sites)

    def _around(
        self, loss: Quadratic, cost: Quadratic, problem: Problem, number: int
    ) -> FloatArray:
        """Return vectors near the front, each moved a little."""
        points = chosen(loss, cost, self.refined + 2)[1:-1]
        noise = stream(problem.seed, "around", number).uniform(-1, 1, points.shape)
        return np.clip(points + self.spread * noise, 0.0, 1.0)


def design(count: int, sites: int, seed: int) -> FloatArray:
    """Return vectors of both ends, balanced for every site, and a sixth of them at equal rates.

    Few sites have few such vectors: theirs are spread over the whole range instead.
    """
    equal = np.linspace(0.0, 1.0, max(2, count // 6) + 1)[1:]
    rest = count - len(equal)
    rng = stream(seed, "design")
    column = np.linspace(0.0, 1.0, rest) if 2**sites < count else np.arange(rest) % 2
    mixed = rng.permuted(np.repeat(column[:, None].astype(np.float64), sites, axis=1), axis=0)
    return np.concatenate([mixed, np.repeat(equal[:, None], sites, axis=1)])


def chosen(loss: Quadratic, cost: Quadratic, count: int) -> FloatArray:
    """Return points of a surrogate's front, spread evenly over the costs."""
    points = trade_off(loss, cost, PRICES)
    points = np.concatenate([np.zeros_like(points[:1]), points, np.ones_like(points[:1])])
    points = points[front(cost(points), loss(points))]
    costs = cost(points)
    places = [int(np.abs(costs - at).argmin()) for at in np.linspace(costs[0], costs[-1], count)]
    return points[list(dict.fromkeys(places))]


def _ask(problem: Problem, points: FloatArray, done: int) -> Ask:
    """Ask for each vector once, at one seed after another."""
    seeds = [(problem.seeds[(done + n) % len(problem.seeds)],) for n in range(len(points))]
    return Ask(points * problem.highest, tuple(seeds))


def _signal(answer: Answer) -> FloatArray:
    return np.array([row.mean() for row in answer.entropy])
