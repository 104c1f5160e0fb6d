import pytest
import torch
from torch import nn

from pliant.nn.cut import cut, cuts
from pliant.nn.models import densenet19, lenet, resnet20

CASES = [(lenet, (3, 32, 32)), (resnet20, (3, 32, 32)), (densenet19, (3, 32, 32))]


@pytest.mark.parametrize(("make", "shape"), CASES)
def test_both_parts_together_are_the_network(make, shape):
    net, x = make(4).eval(), torch.randn(2, *shape)
    places = cuts(net, x)
    for place in places[:: len(places) // 2]:
        found = cut(net, x, place.after)
        sent = found.device.eval()(x)
        sent = sent if isinstance(sent, tuple) else (sent,)
        assert tuple(tuple(value.shape[1:]) for value in sent) == place.shapes
        assert sum(value[0].nbytes for value in sent) == place.bytes
        assert torch.equal(found.server.eval()(*sent), net(x))


def test_figures_of_the_wide_lenet():
    places = {place.after: place for place in cuts(lenet(10), torch.zeros(1, 3, 32, 32))}
    assert (places["stage1"].device_macs, places["stage1"].server_macs) == (1_536_000, 9_365_000)
    assert places["stage1"].bytes == 4 * 5120
    assert [places[f"stage{n}"].shapes[0] for n in (1, 2, 3, 4)] == [
        (20, 16, 16),
        (50, 8, 8),
        (800,),
        (500,),
    ]
    assert "stage5" not in places  # nothing would be left for the server


class Batched(nn.Module):
    """A skip and a batch size that is asked for, both across every cut in between."""

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
    places = {place.after: place for place in cuts(net, x)}
    assert places["first"].shapes == ((6,),)
    assert places["second"].shapes == ((6,), (6,))
    for name in places:
        found = cut(net, x, name)
        sent = found.device(x)
        sent = sent if isinstance(sent, tuple) else (sent,)
        assert torch.equal(found.server(*sent), net(x))


def test_a_layer_that_is_not_there_is_told():
    with pytest.raises(ValueError, match="cut after one of 0, 1, got 'stage1'"):
        cut(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)), torch.zeros(1, 2), "stage1")


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.square, self.last = nn.Linear(3, 3), nn.Linear(3, 1)
        self.weight = nn.Parameter(torch.ones(3, 3))

    def forward(self, x):
        return self.last(self.square(x @ self.weight) @ self.weight)


def test_a_parameter_on_both_sides_is_refused():
    with pytest.raises(ValueError, match="got weight on both sides of 'square'"):
        cut(Tied(), torch.zeros(1, 3), "square")


def test_the_network_keeps_its_mode_and_its_statistics():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(72, 2))
    net.eval()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    cuts(net, torch.randn(1, 1, 8, 8))
    assert not net.training
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
