"""A tiny search in a folder, for tests that kill it: `python search_once.py FOLDER`."""

import sys
from pathlib import Path

from small import images, network

from pliant.engine.search import explore
from pliant.explore import Exploration, Nsga2, Objective

HOW = Exploration(
    by=Nsga2(population=6, generations=3),
    objective=Objective(batches=2, batch=8, seeds=2, snapshot_batches=2, evaluated=20),
    normalisers=3,
    fresh=2,
    rows=8,
)


def run(folder, **options):
    *_, last = explore(network(), images(80), HOW, folder=folder, **options)
    return last


if __name__ == "__main__":
    run(Path(sys.argv[1]))
