"""Run a tiny search in a folder: `python -m tests.table_search.search_once FOLDER`."""

import sys
from pathlib import Path

from tests.engine.small_runs import images, network

from pliant.table_search import Nsga2, SearchSettings, ShortTrainingSettings
from pliant.table_search.run import iter_search

OBJECTIVE = ShortTrainingSettings(batches=2, batch=8, seeds=2, snapshot_batches=2, eval_images=20)
ALGORITHM = Nsga2(population=6, generations=3)
SETTINGS = SearchSettings(ALGORITHM, OBJECTIVE, corner_seeds=3, fresh_seeds=2, rows=8)


def run(folder, **options):
    *_, last = iter_search(network(), images(80), SETTINGS, folder=folder, **options)
    return last


if __name__ == "__main__":
    run(Path(sys.argv[1]))
