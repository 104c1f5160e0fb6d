import pytest
import torch
from torch import nn

from pliant.nn.models.resnet import BasicBlock, resnet18, resnet20


def test_resnet20_has_the_known_size(macs, parameters, convolutions):
    net = resnet20()
    # 269,722 without projections, which add 16 · 32 + 64 and 32 · 64 + 128
    assert parameters(net) == 269_722 + 576 + 2_176
    assert convolutions(net) == 19 + 2
    stage, entry, projection = 2_359_296, 1_179_648, 131_072  # one convolution each
    conv = 442_368 + 6 * stage + 2 * (entry + 5 * stage + projection)
    assert macs(net, 3, 32, 32) == {"conv": conv, "linear": 640}


def test_resnet18_has_the_known_size(macs, parameters, convolutions):
    net = resnet18()
    assert parameters(net) == 11_173_962
    assert convolutions(net) == 17 + 3
    assert sum(macs(net, 3, 32, 32).values()) == 555_422_720


def test_half_the_width_costs_about_a_quarter(macs):
    full, half = macs(resnet20(), 3, 32, 32), macs(resnet20(width=8), 3, 32, 32)
    assert half["conv"] == (full["conv"] - 442_368) // 4 + 442_368 // 2
    assert half["linear"] == 320


def test_only_a_changed_shape_is_projected():
    assert len(BasicBlock(8, 8, 1).shortcut) == 0
    assert len(BasicBlock(8, 16, 2).shortcut) == 2
    assert len(BasicBlock(8, 8, 2).shortcut) == 2


def test_a_block_with_zero_weights_is_its_shortcut():
    block, x = BasicBlock(4, 4, 1), torch.randn(2, 4, 6, 6)
    nn.init.zeros_(block.conv2.weight)
    assert torch.equal(block(x), x.relu())


def test_no_width_is_refused():
    with pytest.raises(ValueError, match="resnet: expected `width` above 0, got 0"):
        resnet18(width=0)
