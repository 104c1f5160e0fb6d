"""Problems whose front is known, and how a search is played against a function."""

import numpy as np

from pliant.explore.problem import Answer, Problem

HIGHEST = 0.5


def problem(sites=6, seed=0):
    """The cost falls with the mean rate; see `squared` for the loss."""
    return Problem(
        sites=sites,
        highest=HIGHEST,
        cost=lambda vectors: 1 - (vectors / HIGHEST).mean(axis=1),
        seeds=tuple(range(10)),
        usual=3,
        seed=seed,
    )


def squared(vectors):
    """With this loss equal rates are best, by Jensen: on the front it is (1 - cost)²."""
    return np.square(vectors / HIGHEST).mean(axis=1)


def play(proposal, loss, noise=0.0):
    """Answer what a search asks; return its front and how many trainings it took."""
    rng = np.random.default_rng(0)
    trainings = 0
    try:
        ask = next(proposal)
        while True:
            found = [
                np.array([value + noise * rng.standard_normal() for _ in seeds])
                for value, seeds in zip(loss(ask.vectors), ask.seeds, strict=True)
            ]
            trainings += sum(map(len, found))
            ask = proposal.send(Answer(found, found))
    except StopIteration as end:
        return end.value, trainings
