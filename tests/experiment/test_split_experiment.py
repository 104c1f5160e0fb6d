import os
from pathlib import Path

import pytest

from pliant import cli
from pliant.analysis.summary import summarise
from pliant.engine.split_loop import check_split_rules
from pliant.experiment.config import load_experiment
from pliant.experiment.sweep import load_sweep, run_sweep
from pliant.workers.pool import InlineWorkers

EXPERIMENTS = Path(__file__).parents[2] / "experiments" / "adasplit"
SPLIT = '[method]\ntype = "split"\n'
TOML = """
rounds = 2
per_round = 3
[network]
name = "digits_cnn"
options = { hidden = 16 }
[data]
name = "digits"
proxy = 7800
[fleet]
size = 3
[rules]
late = "wait"
[evaluation]
every = 2
[matrix.method]
split = { type = "split", cut = "features.2", local = { batch = 64 } }
adasplit = { type = "adasplit", cut = "features.2", kappa = 0.5, local = { batch = 64 } }
fedavg = { type = "fedavg", local = { batch = 64 } }
"""


@pytest.mark.parametrize("path", sorted(EXPERIMENTS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_file_can_be_read_and_has_rules_that_split_rounds_follow(path):
    runs = load_sweep(path)
    assert len(runs) > 10
    for run in runs:
        fleet = run.experiment.fleet
        check_split_rules(run.experiment.settings, fleet, fleet.size)
        assert run.experiment.per_round == run.experiment.fleet.size


def test_federated_and_split_runs_share_a_table(tmp_path):
    (tmp_path / "both.toml").write_text(TOML)
    runs = load_sweep(tmp_path / "both.toml")
    run_sweep(runs, tmp_path / "runs", InlineWorkers())
    split, adasplit, fedavg = summarise(runs, tmp_path / "runs", target=0.99)
    assert split.megabytes > adasplit.megabytes
    assert fedavg.gigamacs > adasplit.gigamacs
    for row in (split, adasplit, fedavg):
        assert 0 < row.c3 <= row.accuracy[0]
    assert fedavg.forward_gigamacs is None
    assert 0 < adasplit.forward_gigamacs < adasplit.total_gigamacs


def test_a_split_run_with_a_deadline_is_refused_before_its_folder_is_made(tmp_path, capsys):
    path = tmp_path / "deadline.toml"
    path.write_text(TOML.partition("[matrix")[0].replace("wait", "partial") + SPLIT)
    assert cli.main(["run", str(path), "--out", str(tmp_path / "run")]) == 2
    assert 'rules.late = "wait" for a split method' in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_split_method_is_not_a_federated_method(tmp_path):
    path = tmp_path / "one.toml"
    path.write_text('method = { type = "adasplit" }\nfleet = { size = 3 }\n')
    with pytest.raises(ValueError, match="federated method, got AdaSplit"):
        _ = load_experiment(path).federated_method


def test_unknown_keys_are_named(tmp_path):
    path = tmp_path / "one.toml"
    path.write_text('method = { type = "adasplit", kapa = 0.3 }\nfleet = { size = 3 }\n')
    with pytest.raises(ValueError, match="kapa"):
        load_experiment(path)


@pytest.mark.skipif("PLIANT_DATA" not in os.environ, reason="PLIANT_DATA is not set")
@pytest.mark.slow
def test_a_mixture_runs_from_its_file(tmp_path):
    path = EXPERIMENTS / "mixed_cifar.toml"
    few = ["rounds=1", "data.samples=32", "data.tests=20", "matrix.seed=[0]"]
    runs = [
        run for run in load_sweep(path, few) if run.name.endswith(("method=adasplit", "fedavg"))
    ]
    run_sweep(runs, tmp_path, InlineWorkers())
    fedavg, adasplit = summarise(runs, tmp_path, target=0.99)
    assert fedavg.local_accuracy is not None
    assert adasplit.local_accuracy is None
