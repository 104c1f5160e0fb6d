"""Hidden linear layers are narrowed too, as in the papers; a network without sites is refused."""

from math import ceil

import pytest
import torch
from tests.engine import small_runs
from torch import nn

from pliant.devices import ConstantTrace, Fleet
from pliant.engine.ledger import TaskRecord
from pliant.engine.round_loop import RunSettings
from pliant.engine.run_store import read_records
from pliant.engine.simulate import simulate
from pliant.experiment.build import build_experiment, build_run_context, run_experiment
from pliant.experiment.config import load_experiment
from pliant.methods import (
    Coherent,
    Distreal,
    Elfish,
    FedAvg,
    FedDropout,
    FedRolex,
    Fjord,
    HeteroFl,
    LocalTraining,
)
from pliant.methods.base import TaskKey
from pliant.nn.elastic import elastic
from pliant.nn.models import femnist_cnn
from pliant.nn.sites import ElasticOptions
from pliant.params import get_params, nbytes
from pliant.workers.pool import InlineWorkers

LOCAL = LocalTraining(batch=8)


def count_by_the_papers_rule(width, classes):
    """Count the parameters and MACs of HeteroFL's FEMNIST CNN, layer by layer.

    Every hidden layer keeps the first ceil(width · n) of its n channels or units; the image and
    the classes are never cut. 5x5 kernels without padding make maps of 24x24 and, after pooling,
    of 8x8; the second pooling leaves 4x4.
    """
    first, second, units = (ceil(width * full) for full in (32, 64, 256))
    params = first * (1 * 25 + 1) + second * (first * 25 + 1)
    params += units * (second * 4 * 4 + 1) + classes * (units + 1)
    macs = 24 * 24 * first * 1 * 25 + 8 * 8 * second * first * 25
    macs += units * second * 4 * 4 + classes * units
    return params, macs


@pytest.mark.parametrize("level", range(5))
@pytest.mark.parametrize("s", [0.5, 0.7])
def test_heterofls_levels_of_the_femnist_cnn_cost_what_the_papers_rule_says(s, level):
    net = elastic(femnist_cnn(), torch.zeros(1, 1, 28, 28), hidden=True)
    subnet = HeteroFl(s=s).select_subnet(net, 4 - level, TaskKey(0, 0, 0), 0)  # rows rise
    params, macs = count_by_the_papers_rule(s**level, classes=62)
    assert nbytes(net.take(get_params(net.module), subnet)) == 4 * params
    assert net.macs(subnet) == macs


SPEC = """
rounds = 1
per_round = 3
method = { type = "heterofl", s = 0.5, local = { batch = 32 } }
fleet = { size = 60, speed = { type = "constant", low = 0.2 } }
network = { name = "femnist_cnn", hidden = true }
data = { name = "digits" }
"""


def test_a_file_can_narrow_hidden_layers(tmp_path):
    path = tmp_path / "hidden.toml"
    path.write_text(SPEC)
    experiment = load_experiment(path)
    folder = tmp_path / "run"
    inputs = build_experiment(experiment)
    list(run_experiment(experiment, *inputs, workers=InlineWorkers(), folder=folder))
    tasks = [record for record in read_records(folder) if isinstance(record, TaskRecord)]
    levels = [4 * count_by_the_papers_rule(0.5**level, classes=10)[0] for level in range(5)]
    assert {task.down for task in tasks} <= set(levels[1:])
    assert all(task.up == task.down for task in tasks)
    assert len(build_run_context(experiment).net.sites) == 3, "on servers and devices"
    apart = load_experiment(path, ["network.name=resnet20", "network.coupled=false"])
    coupled = load_experiment(path, ["network.name=resnet20"])
    counts = [len(build_run_context(spec).net.sites) for spec in (apart, coupled)]
    assert counts[0] > counts[1]


def make_mlp():
    return nn.Sequential(nn.Flatten(), nn.Linear(256, 12), nn.ReLU(), nn.Linear(12, 5))


def run_mlp(method, folder=None, **options):
    settings = RunSettings(rounds=1, per_round=3)
    fleet = Fleet(size=12, speed=ConstantTrace(0.6))
    options = ElasticOptions(**options)
    return list(
        simulate(
            method,
            make_mlp(),
            small_runs.data(),
            fleet,
            settings=settings,
            folder=folder,
            elastic_options=options,
        )
    )


SUBNET_METHODS = [Coherent, Distreal, Elfish, FedDropout, FedRolex, Fjord, HeteroFl]


@pytest.mark.parametrize("kind", SUBNET_METHODS)
def test_a_network_without_sites_is_refused_in_one_line(kind, tmp_path):
    with pytest.raises(ValueError, match=f"{kind.__name__} can narrow, found none") as caught:
        run_mlp(kind(local=LOCAL), tmp_path / "run")
    assert "hidden = true" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", SUBNET_METHODS)
def test_an_mlp_is_narrowed_by_its_hidden_layers(kind):
    options = {"budget": "paced"} if kind is Distreal else {}  # as written, a draw may be late
    method = kind(local=LOCAL, **options)
    [full], [narrow] = run_mlp(FedAvg(LOCAL)), run_mlp(method, hidden=True)
    assert full.merged == 0, "the full network is too slow here"
    assert narrow.merged > 0


def test_there_is_no_advice_where_hidden_layers_do_not_help():
    linear = nn.Sequential(nn.Flatten(), nn.Linear(256, 5))
    method, data = Distreal(local=LOCAL), small_runs.data()
    with pytest.raises(ValueError, match=r"found none$"):
        list(
            simulate(
                method,
                linear,
                data,
                small_runs.FLEET,
                elastic_options=ElasticOptions(hidden=True),
            )
        )
