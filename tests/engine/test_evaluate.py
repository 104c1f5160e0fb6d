import math

import pytest
import small
import torch
from torch import nn

from pliant.data import Iid, Images
from pliant.data.federated import Source
from pliant.engine.evaluate import Evaluation, evaluate
from pliant.nn.models import digits_cnn_bn
from pliant.nn.statistics import Reestimated, Running
from pliant.params import digest, params_of


class First(nn.Module):
    """Take the first pixels themselves for logits."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.scale * x.flatten(1)[:, :2]


def pairs(rows, labels):
    pixels = torch.tensor(rows).view(-1, 1, 1, 2)
    images = Images.from_tensors(pixels, torch.tensor(labels), classes=3)
    return Source(images, images).share(Iid(), 1, proxy=1)


def test_accuracy_loss_and_classes_by_hand():
    data = pairs([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 0.0]], [0, 1, 1, 0])
    net = First()
    for batch in (1, 3, 500):
        score = evaluate(net, params_of(net), data, Evaluation(batch=batch))
        assert score.accuracy == 0.75
        assert score.per_class == (1.0, 0.5, 0.0)  # nothing of class 2 is there
        right, wrong = math.log1p(math.exp(-1)), math.log1p(math.exp(1))
        assert score.loss == pytest.approx((2 * right + wrong + math.log(2)) / 4)


def test_a_loss_that_is_not_finite_is_none():
    data = pairs([[math.inf, 0.0], [0.0, 1.0]], [1, 1])
    net = First()
    assert evaluate(net, params_of(net), data, Evaluation()).loss is None


def test_the_given_parameters_count_and_nothing_is_changed():
    data = pairs([[1.0, 0.0], [0.0, 1.0]], [0, 1])
    net = First().train()
    turned = {"scale": torch.tensor(-1.0)}
    assert evaluate(net, turned, data, Evaluation()).accuracy == 0.0
    assert evaluate(net, params_of(net), data, Evaluation()).accuracy == 1.0
    assert net.training
    assert turned["scale"] == -1.0


def test_norm_statistics_follow_the_policy():
    data, net = small.data(), digits_cnn_bn(5, side=16)
    params = params_of(net)
    before = digest(params)
    running = evaluate(net, params, data, Evaluation(statistics=Running()))
    fresh = evaluate(net, params, data, Evaluation(statistics=Reestimated(samples=20, batch=10)))
    assert running.loss != fresh.loss
    assert digest(params) == before == digest(params_of(net))
    spoilt = params | {
        name: 7 * torch.ones_like(tensor) for name, tensor in params.items() if "running" in name
    }
    assert evaluate(net, spoilt, data, Evaluation()) == evaluate(net, params, data, Evaluation())
