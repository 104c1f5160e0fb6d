import math
from dataclasses import replace

import pytest
import torch
from tests.engine import small_runs
from torch import nn

from pliant.data import Iid, ImageDataset
from pliant.data.federated import TrainTestData
from pliant.engine import evaluation
from pliant.engine.evaluation import (
    Evaluation,
    evaluate,
    evaluate_per_device,
    measure_accuracy,
)
from pliant.nn.models import digits_cnn_bn
from pliant.nn.norm_statistics import ReestimatedStats, RunningStats, prepare_norm_statistics
from pliant.params import digest, get_params


class FirstPixels(nn.Module):
    """Return the first two pixels as logits."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.scale * x.flatten(1)[:, :2]


def make_data(rows, labels):
    pixels = torch.tensor(rows).view(-1, 1, 1, 2)
    images = ImageDataset.from_tensors(pixels, torch.tensor(labels), classes=3)
    return TrainTestData(images, images).share(Iid(), 1, proxy=1)


def test_accuracy_loss_and_classes_by_hand():
    data = make_data([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 0.0]], [0, 1, 1, 0])
    net = FirstPixels()
    for batch in (1, 3, 500):
        score = evaluate(net, get_params(net), data, Evaluation(batch=batch))
        assert score.accuracy == 0.75
        assert score.per_class == (1.0, 0.5, 0.0)  # no images of class 2
        right, wrong = math.log1p(math.exp(-1)), math.log1p(math.exp(1))
        assert score.loss == pytest.approx((2 * right + wrong + math.log(2)) / 4)


def test_a_loss_that_is_not_finite_is_none():
    data = make_data([[math.inf, 0.0], [0.0, 1.0]], [1, 1])
    net = FirstPixels()
    assert evaluate(net, get_params(net), data, Evaluation()).loss is None


def test_the_given_parameters_are_used_and_nothing_is_changed():
    data = make_data([[1.0, 0.0], [0.0, 1.0]], [0, 1])
    net = FirstPixels().train()
    flipped = {"scale": torch.tensor(-1.0)}
    assert evaluate(net, flipped, data, Evaluation()).accuracy == 0.0
    assert evaluate(net, get_params(net), data, Evaluation()).accuracy == 1.0
    assert net.training
    assert flipped["scale"] == -1.0


def test_norm_statistics_follow_the_policy():
    data, net = small_runs.data(), digits_cnn_bn(5, side=16)
    params = get_params(net)
    before = digest(params)
    running = evaluate(net, params, data, Evaluation(statistics=RunningStats()))
    statistics = ReestimatedStats(samples=20, batch=10)
    fresh = evaluate(net, params, data, Evaluation(statistics=statistics))
    assert running.loss != fresh.loss
    assert digest(params) == before == digest(get_params(net))
    running_params = {name: tensor for name, tensor in params.items() if "running" in name}
    wrong = params | {name: torch.full_like(t, 7) for name, t in running_params.items()}
    assert evaluate(net, wrong, data, Evaluation()) == evaluate(net, params, data, Evaluation())


def test_norm_statistics_of_the_shared_network_are_settled_once(monkeypatch):
    shares = tuple(torch.arange(60).view(3, 20).numpy())
    data = replace(small_runs.data(devices=3), test_shares=shares)
    net = digits_cnn_bn(5, filters=(4, 6), hidden=16, side=16)
    params, how = get_params(net), Evaluation()
    trained = {1: {name: 1.5 * tensor for name, tensor in params.items()}}
    expected = [measure_accuracy(net, params, data, device, how) for device in range(3)]
    alone = measure_accuracy(net, trained[1], data, 1, how)
    calls = []

    def count_calls(*arguments):
        calls.append(arguments)
        return prepare_norm_statistics(*arguments)

    monkeypatch.setattr(evaluation, "prepare_norm_statistics", count_calls)
    score = evaluate_per_device(net, params, trained, data, how)
    assert score.per_device == tuple(expected)
    assert score.after_training == (None, alone, None)
    assert len(calls) == 2
