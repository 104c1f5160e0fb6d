"""Weights are scaled and converted for all layers at once, without a change of the numbers."""

import torch
from torch import nn

from pliant.nn.compiler.layer_weights import WeightRead, prepare_weights

READS = [
    WeightRead("conv", 0, 4.0),  # 8 samples of 4 positions: more rows than the 2 · 9 weights each
    WeightRead("linear", 0, 1.0),  # 8 rows, fewer than the 10 outputs
    WeightRead("conv", None, 4.0),  # once more, unscaled
    WeightRead("unread", 0, 4.0),
]


def test_the_smaller_of_weights_and_inputs_is_scaled_and_gradients_add_up() -> None:
    params = {
        "conv": torch.randn(2, 3, 3, 3, requires_grad=True),
        "linear": torch.randn(10, 3, requires_grad=True),
        "unread": torch.randn(2, 3, 3, 3, requires_grad=True),
    }
    scaled, linear, plain, _ = prepare_weights(READS, params, [3.0], 8, True)
    assert scaled[1] is None
    assert torch.equal(scaled[0], 3.0 * params["conv"])
    assert scaled[0].is_contiguous(memory_format=torch.channels_last)
    assert linear[0] is params["linear"]  # left to the layer, which scales its input
    assert linear[1] == 3.0
    assert plain[1] is None
    assert torch.equal(plain[0], params["conv"])
    total = scaled[0].sum() + 5 * plain[0].sum() + 7 * linear[0].sum()
    conv, weight, unread = torch.autograd.grad(total, list(params.values()), allow_unused=True)
    assert torch.equal(conv, torch.full((2, 3, 3, 3), 8.0))
    assert torch.equal(weight, torch.full((10, 3), 7.0))
    assert unread is None  # no gradient is not a gradient of zero: nothing decays


def test_nothing_is_copied_without_factors_and_conversion() -> None:
    params = {"conv": nn.Parameter(torch.randn(2, 3, 3, 3))}
    [(weight, factor)] = prepare_weights(READS[2:3], params, [], 8, False)
    assert weight is params["conv"]
    assert factor is None
