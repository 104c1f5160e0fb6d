import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from pliant.nn.models.densenet import Bottleneck, densenet19, densenet40, densenet100, densenet_bc


@pytest.mark.parametrize(
    ("depth", "classes", "layers", "conv", "linear", "count"),
    [
        (16, 10, 15, 19_943_424, 480, 44_410),
        (19, 10, 15, 19_943_424, 480, 44_410),
        (22, 10, 21, 31_237_632, 690, 71_686),
        (40, 10, 39, 72_364_032, 1_320, 176_122),
        (40, 100, 39, 72_364_032, 13_200, 188_092),
        (100, 100, 99, 287_926_272, 34_200, 800_032),
    ],
)
def test_sizes_match_the_papers(
    depth, classes, layers, conv, linear, count, macs, parameters, convolutions
):
    net = densenet_bc(depth, classes)
    assert convolutions(net) == layers
    assert parameters(net) == count
    assert macs(net, 3, 32, 32) == {"conv": conv, "linear": linear}


def test_named_networks_have_their_depths(parameters):
    assert parameters(densenet19()) == 44_410
    assert parameters(densenet40()) == 176_122
    assert parameters(densenet40(classes=100)) == 188_092
    assert parameters(densenet100()) == 800_032


def test_old_channels_come_before_new_ones():
    block, x = Bottleneck(5, growth=3), torch.rand(2, 5, 4, 4)
    y = block(x)
    assert y.shape == (2, 8, 4, 4)
    assert torch.equal(y[:, :5], x)


def test_convolutions_read_all_previous_channels():
    convs = [m for m in densenet_bc(16).modules() if isinstance(m, nn.Conv2d)]
    assert [conv.in_channels for conv in convs] == [
        *(3, 24, 48, 36, 48),  # the stem and the first block
        *(48, 24, 48, 36, 48),
        *(48, 24, 48, 36, 48),
    ]


@example(depth=7)  # the right remainder, but no bottleneck
@given(depth=st.integers(-100, 400).filter(lambda d: d < 10 or (d - 4) % 3 != 0))
def test_impossible_depths_are_refused(depth):
    with pytest.raises(ValueError, match=f"got {depth}$"):
        densenet_bc(depth)


def test_a_smaller_growth_makes_it_narrower(macs):
    assert macs(densenet_bc(16, growth=6), 3, 32, 32)["linear"] == 240
