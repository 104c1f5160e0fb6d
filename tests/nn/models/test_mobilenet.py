import pytest
import torch
from torch import nn

from pliant.nn.models.mobilenet import InvertedResidual, mobilenet_v2


def test_it_has_the_parameters_of_the_paper(parameters, convolutions):
    # for 1,000 classes; strides have no parameters
    assert parameters(mobilenet_v2(classes=1000)) == 3_504_872
    assert convolutions(mobilenet_v2()) == 52


def test_it_has_the_macs_of_its_table(macs):
    def block(inputs, filters, expansion, stride, side):
        inner, out = inputs * expansion, side // stride
        widen = inputs * inner * side**2 if expansion > 1 else 0
        return widen + 9 * inner * out**2 + inner * filters * out**2

    rows = [(32, 16, 1, 1, 32), (16, 24, 6, 1, 32), (24, 24, 6, 1, 32)]
    rows += [(24, 32, 6, 2, 32), *[(32, 32, 6, 1, 16)] * 2]
    rows += [(32, 64, 6, 2, 16), *[(64, 64, 6, 1, 8)] * 3, (64, 96, 6, 1, 8)]
    rows += [*[(96, 96, 6, 1, 8)] * 2, (96, 160, 6, 2, 8), *[(160, 160, 6, 1, 4)] * 2]
    rows += [(160, 320, 6, 1, 4)]
    ends = 27 * 32 * 32**2 + 320 * 1280 * 4**2
    conv = ends + sum(block(*row) for row in rows)
    assert macs(mobilenet_v2(), 3, 32, 32) == {"conv": conv, "linear": 12_800}


@pytest.mark.parametrize(
    ("width", "count"), [(0.5, 1_987_224), (0.75, 2_663_064), (1.0, 3_538_984)]
)
def test_every_width_has_the_size_published_by_keras(width, count, parameters):
    net = mobilenet_v2(classes=1000, width=width)
    norms = [module for module in net.modules() if isinstance(module, nn.BatchNorm2d)]
    # Keras counts the running means and variances too
    assert parameters(net) + sum(2 * norm.num_features for norm in norms) == count


def test_widths_are_multiples_of_eight():
    for width in (0.1, 0.35, 0.5, 1.3):
        convs = [m for m in mobilenet_v2(width=width).modules() if isinstance(m, nn.Conv2d)]
        assert all(conv.out_channels % 8 == 0 for conv in convs)


def test_a_block_adds_its_input_only_if_shapes_agree():
    for inputs, filters, stride, has_shortcut in [
        (8, 8, 1, True),
        (8, 16, 1, False),
        (8, 8, 2, False),
    ]:
        block, x = InvertedResidual(inputs, filters, 6, stride), torch.randn(2, inputs, 4, 4)
        nn.init.zeros_(block.layers[-1].weight)
        assert torch.equal(
            block(x), x if has_shortcut else torch.zeros(2, filters, 4 // stride, 4 // stride)
        )


def test_no_width_is_refused():
    with pytest.raises(ValueError, match=r"mobilenet_v2: expected `width` above 0, got 0\.0"):
        mobilenet_v2(width=0.0)
