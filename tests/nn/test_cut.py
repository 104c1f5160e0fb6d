import pytest
import torch
from torch import nn

from pliant.nn.cut import find_cut_points, split_network
from pliant.nn.models import densenet19, lenet, resnet20

CASES = [(lenet, (3, 32, 32)), (resnet20, (3, 32, 32)), (densenet19, (3, 32, 32))]


@pytest.mark.parametrize(("make", "shape"), CASES)
def test_both_parts_together_equal_the_network(make, shape):
    net, x = make(4).eval(), torch.randn(2, *shape)
    cut_points = find_cut_points(net, x)
    for cut_point in cut_points[:: len(cut_points) // 2]:
        parts = split_network(net, x, cut_point.after)
        tensors = parts.device.eval()(x)
        tensors = tensors if isinstance(tensors, tuple) else (tensors,)
        assert tuple(tuple(value.shape[1:]) for value in tensors) == cut_point.shapes
        assert sum(value[0].nbytes for value in tensors) == cut_point.bytes
        assert torch.equal(parts.server.eval()(*tensors), net(x))


def test_the_costs_of_the_wide_lenet():
    cut_points = {
        cut_point.after: cut_point
        for cut_point in find_cut_points(lenet(10), torch.zeros(1, 3, 32, 32))
    }
    assert (cut_points["stage1"].device_macs, cut_points["stage1"].server_macs) == (
        1_536_000,
        9_365_000,
    )
    assert cut_points["stage1"].bytes == 4 * 5120
    assert [cut_points[f"stage{n}"].shapes[0] for n in (1, 2, 3, 4)] == [
        (20, 16, 16),
        (50, 8, 8),
        (800,),
        (500,),
    ]
    assert "stage5" not in cut_points  # the server's part would be empty


class Batched(nn.Module):
    """A skip connection and a batch size, both of which cross every cut."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.last = nn.Linear(6, 2)

    def forward(self, x):
        count = x.size(0)
        first = self.first(x)
        second = self.second(first) + first
        return self.last(second.reshape(count, 6))


def test_skips_and_batch_sizes_cross_a_cut():
    net, x = Batched(), torch.randn(3, 6)
    cut_points = {cut_point.after: cut_point for cut_point in find_cut_points(net, x)}
    assert cut_points["first"].shapes == ((6,),)
    assert cut_points["second"].shapes == ((6,), (6,))
    for name in cut_points:
        parts = split_network(net, x, name)
        tensors = parts.device(x)
        tensors = tensors if isinstance(tensors, tuple) else (tensors,)
        assert torch.equal(parts.server(*tensors), net(x))


def test_an_unknown_layer_is_refused():
    with pytest.raises(ValueError, match="cut after one of 0, 1, got 'stage1'"):
        split_network(
            nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)), torch.zeros(1, 2), "stage1"
        )


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.square, self.last = nn.Linear(3, 3), nn.Linear(3, 1)
        self.weight = nn.Parameter(torch.ones(3, 3))

    def forward(self, x):
        return self.last(self.square(x @ self.weight) @ self.weight)


def test_a_parameter_on_both_sides_is_refused():
    with pytest.raises(ValueError, match="got weight on both sides of 'square'"):
        split_network(Tied(), torch.zeros(1, 3), "square")


def test_the_network_keeps_its_mode_and_its_statistics():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(72, 2))
    net.eval()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    find_cut_points(net, torch.randn(1, 1, 8, 8))
    assert not net.training
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
