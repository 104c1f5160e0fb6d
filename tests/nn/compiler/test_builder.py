import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pliant.nn.elastic import elastic
from pliant.nn.optimisers import Sgd
from pliant.nn.trainer import SubnetTrainer
from pliant.params import get_params
from pliant.rng import rng_stream


class Pooled(nn.Module):
    """A convolution, an activation and a max pooling."""

    def __init__(self, activation, pool):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8)
        self.activation, self.pool, self.head = activation, pool, nn.LazyLinear(3)

    def forward(self, x):
        return self.head(self.pool(self.activation(self.norm(self.conv(x)))).flatten(1))


def train(activation, pool):
    """Return the params after a few steps on changing subnets, and the names of instructions."""
    torch.manual_seed(0)
    example = torch.zeros(2, 1, 12, 12)
    module = Pooled(activation, pool)
    module(example)
    net = elastic(module, example[:1])
    trainer = SubnetTrainer(net, get_params(module), Sgd(lr=0.5))
    for step in range(4):
        trainer.switch(net.draw(0.5, rng_stream(0, "dropout", step)))
        x = torch.randn(6, 1, 12, 12).round()  # with ties
        trainer.step(x, lambda output: F.cross_entropy(output, torch.arange(6) % 3))
    return trainer.params(), [instruction.name for instruction in net.program.instructions]


POOLS = {
    "plain": nn.MaxPool2d(2),
    "overlapping": nn.MaxPool2d(3, stride=1, padding=1),
    "uneven": nn.MaxPool2d(3, stride=2, ceil_mode=True),
}


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("is_in_place", [False, True])
def test_a_relu_after_max_pooling_gives_the_same_bits(pool, is_in_place):
    # Threshold(0, 0) is a ReLU by another name, which stays where it is
    expected, names = train(nn.Threshold(0.0, 0.0), POOLS[pool])
    assert "activation" in names
    params, names = train(nn.ReLU(is_in_place), POOLS[pool])
    assert "activation" not in names
    assert all(torch.equal(params[name], expected[name]) for name in expected)


class TwoReaders(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 8, 3), nn.Linear(16, 2)

    def forward(self, x):
        x = F.relu(self.conv(x))
        pooled, indices = F.max_pool2d(x, 10, return_indices=True)
        mean = x.mean((2, 3)) + 0 * indices.flatten(1)
        return self.head(torch.cat([pooled.flatten(1), mean], 1))


def test_a_relu_with_another_reader_stays_where_it_is():
    example = torch.zeros(1, 1, 12, 12)
    net = elastic(TwoReaders(), example)
    assert any("relu" in instruction.name for instruction in net.program.instructions)
