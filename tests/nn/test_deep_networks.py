"""Networks with more layers than Python allows nested calls."""

import sys
from itertools import pairwise
from typing import Any

import pytest
import torch
from tests.nn.compare_masked import assert_compact_equals_masked
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from pliant.nn.elastic import elastic
from pliant.params import get_params


class Chain(nn.Module):
    """Residual layers, one after the other."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(2, 2, 1), nn.Linear(2, 3)
        self.layers = nn.ModuleList(nn.Conv2d(2, 2, 1) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = x + layer(x)
        out: Tensor = self.head(x.mean((2, 3)))
        return out


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        sizes = [(inputs, width, 1, 1), (width, width, 3, stride), (width, 2 * width, 1, 1)]
        self.convs = nn.ModuleList(
            nn.Conv2d(i, o, k, s, padding=k // 2, bias=False) for i, o, k, s in sizes
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(size[1]) for size in sizes)
        self.shortcut = (
            nn.Conv2d(inputs, 2 * width, 1, stride) if inputs != 2 * width or stride > 1 else None
        )

    def forward(self, x: Tensor) -> Tensor:
        out = x
        for index, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            out = norm(conv(out))
            out = out.relu() if index < 2 else out
        return (out + (x if self.shortcut is None else self.shortcut(x))).relu()


def make_resnet152() -> nn.Sequential:
    """Return a network of ResNet-152's depth, with two to five filters per layer."""
    widths = (2, 3, 4, 5)
    layers: list[nn.Module] = [nn.Conv2d(3, 4, 3, padding=1)]
    inputs = [4, *(2 * width for width in widths)]
    for count, width, (before, after) in zip((3, 8, 36, 3), widths, pairwise(inputs), strict=True):
        layers += [Bottleneck(before if not i else after, width, 1 + (not i)) for i in range(count)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(10, 3))


def test_a_chain_of_many_layers_is_computed_as_in_the_network() -> None:
    torch.manual_seed(0)
    module, x = Chain(600).double(), torch.rand(2, 2, 2, 3, dtype=torch.float64)
    net = elastic(module, x)
    torch.testing.assert_close(net.run(get_params(module), net.full, x), module(x))
    with FlopCounterMode(display=False) as counter:
        module(x)
    assert int(counter.get_total_flops()) == 2 * len(x) * net.macs(0.0)


@pytest.mark.slow
def test_a_network_as_deep_as_resnet152_equals_its_masked_version() -> None:
    torch.manual_seed(0)
    x = torch.rand(2, 3, 8, 8, dtype=torch.float64)
    assert_compact_equals_masked(make_resnet152().double(), x, coupled=True)


def test_the_work_of_compilation_grows_with_the_number_of_layers() -> None:
    few, many = (_count_calls(depth) for depth in (60, 120))
    assert many < 2.2 * few


def _count_calls(depth: int) -> int:
    """Return the number of Python functions called to make a chain elastic."""
    module, num_calls = Chain(depth), 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal num_calls
        num_calls += event == "call"

    previous = sys.getprofile()
    sys.setprofile(count)
    try:
        elastic(module, torch.zeros(1, 2, 2, 2))
    finally:
        sys.setprofile(previous)
    return num_calls
