"""A run that cannot work is refused in one line, before anything is written."""

import pytest
import torch
from tests.engine import small_runs
from torch import nn

from pliant.data import Iid
from pliant.data.federated import TrainTestData
from pliant.devices import Fleet
from pliant.engine.evaluation import Evaluation
from pliant.engine.round_loop import RunSettings
from pliant.engine.simulate import simulate
from pliant.methods import FedAvg, LocalTraining
from pliant.nn.models import digits_cnn_bn
from pliant.nn.norm_statistics import RunningStats

FLAT = nn.Sequential(nn.Flatten(), nn.Linear(256, 6), nn.BatchNorm1d(6), nn.Linear(6, 5))
SINGLE_PIXEL = nn.Sequential(
    nn.Conv2d(1, 4, 16), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 5)
)  # a map of 1x1
MAPS = digits_cnn_bn(5, filters=(4, 6), hidden=16, side=16)


def run(net, samples, *, proxy=20, evaluation=None, folder=None, **local):
    """Run two rounds on two devices with this many samples each."""
    images = small_runs.images(2 * samples + proxy)
    data = TrainTestData(images, small_runs.images(10)).share(Iid(), 2, proxy=proxy)
    settings = RunSettings(rounds=2, per_round=2, evaluation=evaluation or Evaluation())
    method = FedAvg(LocalTraining(**local))
    fleet = Fleet(size=2)
    return list(simulate(method, net, data, fleet, settings=settings, folder=folder))


@pytest.mark.parametrize("net", [FLAT, SINGLE_PIXEL], ids=["linear", "conv"])
def test_a_lone_last_sample_is_refused_before_the_run(net, tmp_path):
    with pytest.raises(ValueError, match="drop_short") as caught:
        run(net, 9, batch=8, folder=tmp_path / "run")
    message = str(caught.value)
    assert "device 0" in message
    assert "9 samples in batches of 8" in message
    assert "\n" not in message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("net", [FLAT, SINGLE_PIXEL], ids=["linear", "conv"])
def test_without_short_batches_it_trains(net):
    records = run(net, 9, batch=8, epochs=2, drop_short=True)
    assert [record.merged for record in records] == [2, 2]
    assert records[0].samples == 2 * 2 * 8


@pytest.mark.parametrize(("net", "samples"), [(MAPS, 9), (FLAT, 10)], ids=["maps", "two left"])
def test_what_the_network_can_train_on_is_not_refused(net, samples):
    assert [record.merged for record in run(net, samples, batch=8)] == [2, 2]


@pytest.mark.parametrize(("samples", "batch"), [(1, 8), (8, 1)])
def test_there_is_no_advice_to_drop_what_is_all_there_is(samples, batch):
    with pytest.raises(ValueError, match="at least 2 samples") as caught:
        run(FLAT, samples, batch=batch, drop_short=True)
    assert "drop_short" not in str(caught.value)


@pytest.mark.parametrize("proxy", [0, 1])
def test_norm_statistics_without_proxy_images_are_refused_before_the_run(proxy, tmp_path):
    with pytest.raises(ValueError, match=f"at least 2 proxy images .*, got {proxy}$"):
        run(MAPS, 8, proxy=proxy, folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    run(MAPS, 8, proxy=proxy, evaluation=Evaluation(statistics=RunningStats()))
    run(small_runs.network(), 8, proxy=proxy)


def test_checking_changes_nothing():
    before = {name: tensor.clone() for name, tensor in MAPS.state_dict().items()}
    state, was_training = torch.get_rng_state(), MAPS.training
    run(MAPS, 9, batch=8)
    assert all(torch.equal(before[name], tensor) for name, tensor in MAPS.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert MAPS.training == was_training
