import pytest
import torch
from torch import nn

from pliant.nn.models.cnn import (
    cifar_cnn,
    digits_cnn,
    digits_cnn_bn,
    femnist_cnn,
    femnist_cnn_small,
)


def test_the_femnist_network_has_the_macs_of_the_paper(macs):
    # 24² · 25 · 32, 8² · 25 · 32 · 64; 1024 · 256, 256 · 62
    assert macs(femnist_cnn(), 1, 28, 28) == {
        "conv": 460_800 + 3_276_800,
        "linear": 262_144 + 15_872,
    }
    assert sum(macs(femnist_cnn(), 1, 28, 28).values()) == 4_015_616


def test_the_small_femnist_network_costs_a_third(macs):
    assert sum(macs(femnist_cnn_small(), 1, 28, 28).values()) == 1_324_736


@pytest.mark.parametrize("build", [digits_cnn, digits_cnn_bn])
def test_the_digits_network_costs_less_than_a_million_macs(build, macs):
    assert sum(macs(build(), 1, 28, 28).values()) == 172_800 + 460_800 + 49_152 + 1_280


def test_norms_replace_biases(parameters):
    norms = [m for m in digits_cnn_bn().modules() if isinstance(m, nn.BatchNorm2d)]
    assert [norm.num_features for norm in norms] == [12, 24]
    assert parameters(digits_cnn_bn()) == parameters(digits_cnn()) + 12 + 24


@pytest.mark.parametrize("side", [16, 28, 29, 32])
def test_other_image_sizes_fit(side):
    assert digits_cnn(channels=3, side=side)(torch.zeros(2, 3, side, side)).shape == (2, 10)


def test_too_small_an_image_is_refused():
    with pytest.raises(ValueError, match="expected images with `side` of 16 or more, got 15"):
        femnist_cnn(side=15)


def test_no_filters_are_refused():
    with pytest.raises(ValueError, match=r"expected `filters\[1\]` above 0, got 0"):
        femnist_cnn(filters=(32, 0))


def test_the_cifar_network_costs_nine_million_macs(macs):
    # 32² · 27 · 32, 16² · 288 · 64, 8² · 576 · 64, 4² · 576 · 128; 128 · 10
    convolutions = 884_736 + 4_718_592 + 2_359_296 + 1_179_648
    assert macs(cifar_cnn(), 3, 32, 32) == {"conv": convolutions, "linear": 1_280}


def test_the_cifar_network_takes_images_of_any_size_from_8():
    for side in (8, 13, 32):
        assert cifar_cnn(classes=5)(torch.zeros(2, 3, side, side)).shape == (2, 5)


def test_a_cifar_network_without_filters_is_refused():
    with pytest.raises(ValueError, match=r"cifar_cnn: expected `filters\[1\]` above 0, got 0"):
        cifar_cnn(filters=(8, 0))
