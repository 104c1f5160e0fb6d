import pytest

from pliant.nn.models.vgg import vgg11


def test_it_has_the_known_size(macs, parameters, convolutions):
    net = vgg11()
    # 9,231,114 with biases before the norms, which are 64 + 128 + 2 · 256 + 4 · 512
    assert parameters(net) == 9_231_114 - 2_752
    assert convolutions(net) == 8
    third = 9 * 8**2 * (128 * 256 + 256 * 256)
    fourth = 9 * 4**2 * (256 * 512 + 512 * 512)
    fifth = 9 * 2**2 * 2 * 512 * 512
    conv = 27 * 64 * 32**2 + 9 * 64 * 128 * 16**2 + third + fourth + fifth
    assert macs(net, 3, 32, 32) == {"conv": conv, "linear": 5_120}


def test_half_the_width_costs_about_a_quarter(macs):
    full, half = macs(vgg11(), 3, 32, 32), macs(vgg11(width=32), 3, 32, 32)
    assert half["conv"] == (full["conv"] - 1_769_472) // 4 + 1_769_472 // 2


def test_a_negative_width_is_refused():
    with pytest.raises(ValueError, match="vgg: expected `width` above 0, got -1"):
        vgg11(width=-1)
