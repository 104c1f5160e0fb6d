import os
from pathlib import Path

import pytest

from pliant.compare import members, run_all, table
from pliant.engine.workers import Inline
from pliant.experiment import load_experiment

EXPERIMENTS = Path(__file__).parents[2] / "experiments" / "adasplit"
TOML = """
rounds = 2
per_round = 3
[network]
name = "lenet_small"
[data]
name = "digits"
proxy = 7800
[fleet]
size = 3
[evaluation]
every = 2
[matrix.method]
split = { type = "split", local = { batch = 64 } }
adasplit = { type = "adasplit", kappa = 0.5, local = { batch = 64 } }
fedavg = { type = "fedavg", local = { batch = 64 } }
"""


@pytest.mark.parametrize("path", sorted(EXPERIMENTS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_file_can_be_read(path):
    assert len(members(path)) > 10


def test_federated_and_split_runs_stand_in_one_table(tmp_path):
    (tmp_path / "both.toml").write_text(TOML)
    found = members(tmp_path / "both.toml")
    run_all(found, tmp_path / "runs", Inline())
    split, adasplit, fedavg = table(found, tmp_path / "runs", target=0.99)
    assert split.megabytes > adasplit.megabytes
    assert fedavg.gigamacs > adasplit.gigamacs
    for row in (split, adasplit, fedavg):
        assert 0 < row.c3 <= row.accuracy[0]
    assert fedavg.forward is None
    assert 0 < adasplit.forward < adasplit.total


def test_a_split_method_is_refused_where_only_a_federated_one_will_do(tmp_path):
    path = tmp_path / "one.toml"
    path.write_text('method = { type = "adasplit" }\nfleet = { size = 3 }\n')
    with pytest.raises(ValueError, match="federated method, got AdaSplit"):
        _ = load_experiment(path).federated


def test_unknown_words_are_told(tmp_path):
    path = tmp_path / "one.toml"
    path.write_text('method = { type = "adasplit", kapa = 0.3 }\nfleet = { size = 3 }\n')
    with pytest.raises(ValueError, match="kapa"):
        load_experiment(path)


@pytest.mark.skipif("PLIANT_DATA" not in os.environ, reason="PLIANT_DATA is not set")
@pytest.mark.slow
def test_a_mixture_runs_from_its_file(tmp_path):
    path = EXPERIMENTS / "mixed_cifar.toml"
    few = ["rounds=1", "data.samples=32", "data.tests=20", "matrix.seed=[0]"]
    found = [m for m in members(path, few) if m.name.endswith(("method=adasplit", "fedavg"))]
    run_all(found, tmp_path, Inline())
    fedavg, adasplit = table(found, tmp_path, target=0.99)
    assert fedavg.local is not None
    assert adasplit.local is None
