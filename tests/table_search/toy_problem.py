"""A problem whose front is known, and a driver that answers a search from a function."""

import numpy as np

from pliant.table_search.ask_tell import SearchProblem, TrialLosses

HIGHEST = 0.5


def make_problem(sites=6, seed=0):
    """Make a problem whose cost falls with the mean rate; see `squared` for the loss."""
    return SearchProblem(
        genes=sites,
        highest_rate=HIGHEST,
        cost=lambda vectors: 1 - (vectors / HIGHEST).mean(axis=1),
        seeds=tuple(range(10)),
        search_seed_count=3,
        seed=seed,
    )


def squared(vectors):
    """Return a loss for which equal rates are best, by Jensen: on the front it is (1 - cost)²."""
    return np.square(vectors / HIGHEST).mean(axis=1)


def run_search(generator, loss, noise=0.0):
    """Serve the requests of a search; return its front and the number of trainings."""
    rng = np.random.default_rng(0)
    trainings = 0
    try:
        request = next(generator)
        while True:
            losses = [
                np.array([value + noise * rng.standard_normal() for _ in seeds])
                for value, seeds in zip(loss(request.vectors), request.seeds, strict=True)
            ]
            trainings += sum(map(len, losses))
            request = generator.send(TrialLosses(losses, losses))
    except StopIteration as stop:
        return stop.value, trainings
