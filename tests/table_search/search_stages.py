"""Run a tiny search of sides, batch shares and stages: `python -m … FOLDER`."""

import sys
from pathlib import Path

import torch
from msgspec.structs import replace
from tests.engine.small_runs import images
from tests.table_search.search_once import OBJECTIVE

from pliant.nn.models import cifar_cnn
from pliant.table_search import SearchSettings, SurrogateSearch
from pliant.table_search.run import iter_search

SETTINGS = SearchSettings(
    SurrogateSearch(min_design=12, rounds=1, per_round=4, vectors=8),
    replace(OBJECTIVE, snapshot_batches=6),
    corner_seeds=2,
    fresh_seeds=2,
    rows=10,
    sides=(8, 12),
    batch_shares=(0.5,),
    stages=(0.0, 0.5),
)


def make_network():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return cifar_cnn(5, filters=(4, 6), channels=1)


def run(folder=None, settings=SETTINGS, **options):
    *_, last = iter_search(make_network(), images(80), settings, folder=folder, **options)
    return last


if __name__ == "__main__":
    run(Path(sys.argv[1]))
