import pytest
import torch
from torch import nn

from pliant.nn.models.lenet import lenet, lenet_small


@pytest.mark.parametrize(("classes", "count"), [(5, 2_990_375), (10, 2_992_880)])
def test_it_has_the_parameters_of_the_paper(classes, count, parameters):
    assert parameters(lenet(classes)) == count


@pytest.mark.parametrize(("classes", "rest"), [(5, 9_362_500), (10, 9_365_000)])
def test_device_and_server_have_the_macs_of_the_paper(classes, rest, macs):
    net = lenet(classes)
    assert sum(macs(net[:1], 3, 32, 32).values()) == 1_536_000
    assert sum(macs(net[1:], 20, 16, 16).values()) == rest


def test_it_can_be_cut_after_any_stage():
    net, x = lenet(), torch.rand(2, 3, 32, 32)
    shapes = [(20, 16, 16), (50, 8, 8), (800,), (500,), (5,)]
    assert [name for name, _ in net.named_children()] == [f"stage{s}" for s in range(1, 6)]
    for s, shape in enumerate(shapes, start=1):
        activations = net[:s](x)
        assert activations.shape == (2, *shape)
        assert torch.equal(net[s:](activations), net(x))


def test_a_convolution_stage_is_convolution_relu_response_norm_and_pooling():
    # large values, to make the norm's small alpha visible
    net, x = lenet().double(), 300 * torch.rand(1, 3, 32, 32).double()
    conv = net.stage1[0]
    positive = nn.functional.conv2d(x, conv.weight, conv.bias, padding=2).clamp_min(0)
    # torch's window of size 4 reaches two channels back and one ahead; alpha is divided by the size
    squares = torch.nn.functional.pad(positive**2, (0, 0, 0, 0, 2, 1)).unfold(1, 4, 1).sum(-1)
    normed = positive / (1 + 0.001 / 9 / 4 * squares) ** 0.75
    expected = nn.functional.max_pool2d(normed, 3, stride=2, padding=1)
    torch.testing.assert_close(net.stage1(x), expected)


def test_the_small_network_has_half_of_everything(macs):
    net = lenet_small()
    assert sum(macs(net[:1], 3, 32, 32).values()) == 1_536_000 // 2
    assert (net.stage3[1].out_features, net.stage4[0].out_features) == (400, 250)


@pytest.mark.parametrize("side", [1, 27, 28, 33])
def test_other_image_sizes_fit(side):
    assert lenet_small(channels=1, side=side)(torch.zeros(2, 1, side, side)).shape == (2, 5)


def test_no_classes_are_refused():
    with pytest.raises(ValueError, match="lenet: expected `classes` above 0, got 0"):
        lenet(0)
