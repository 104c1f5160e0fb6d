"""Batch norm in rows of several pixels gives the numbers of torch's, to rounding."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pliant.nn.compiler import folded_norm
from pliant.nn.compiler.folded_norm import count_row_pixels, normalise_folded
from pliant.nn.elastic import elastic


def make_image(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    scale = 1 + torch.arange(shape[1], dtype=dtype).view(-1, 1, 1)  # another one for each channel
    image = 3 + scale * torch.randn(shape, dtype=dtype)
    return image.contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("has_relu", [True, False])
@pytest.mark.parametrize("has_params", [True, False])
@pytest.mark.parametrize(("channels", "count"), [(1, 128), (6, 32), (7, 32), (18, 8), (130, 8)])
def test_a_folded_norm_gives_the_numbers_of_torch(
    channels: int, count: int, has_params: bool, has_relu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folded_norm, "MIN_PIXELS", 1)
    torch.manual_seed(channels)
    x = make_image(4, channels, 8, 8).requires_grad_()
    assert count_row_pixels(x) == count
    params = [torch.randn(channels, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    weight, bias = params if has_params else (None, None)
    grad = torch.randn_like(x)
    results = []
    for is_folded in (True, False):
        mean, variance = torch.zeros(channels).double(), torch.ones(channels).double()
        if is_folded:
            options: dict[str, Any] = {
                "momentum": 0.3,
                "eps": 1e-5,
                "count": count,
                "has_relu": has_relu,
            }
            out = normalise_folded(x, mean, variance, weight, bias, **options)
        else:
            out = F.batch_norm(x, mean, variance, weight, bias, True, 0.3, 1e-5)
            out = torch.relu(out) if has_relu else out
        leaves = [x, *params] if has_params else [x]
        results.append([out, mean, variance, *torch.autograd.grad(out, leaves, grad.clone())])
    assert results[0][0].is_contiguous(memory_format=torch.channels_last)
    for folded, expected in zip(*results, strict=True):
        torch.testing.assert_close(folded, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("has_relu", [True, False])
def test_a_gradient_of_the_gradient_flows_through_a_folded_norm(has_relu: bool) -> None:
    values = [make_image(4, 2, 2, 2).requires_grad_()]
    values += [torch.rand(2, dtype=torch.float64, requires_grad=True) for _ in range(2)]

    def run(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        options: dict[str, Any] = {"momentum": 0.0, "eps": 1e-5, "count": 4, "has_relu": has_relu}
        return normalise_folded(x, None, None, weight, bias, **options)

    assert torch.autograd.gradcheck(run, values)
    assert torch.autograd.gradgradcheck(run, values)


def test_a_gradient_that_others_read_is_not_overwritten() -> None:
    x = make_image(4, 6, 8, 8).requires_grad_()
    options: dict[str, Any] = {"momentum": 0.0, "eps": 1e-5, "count": 32, "has_relu": False}
    out = normalise_folded(x, None, None, None, None, **options)
    grad = torch.randn_like(out)
    before = grad.clone()
    torch.autograd.grad(out, x, grad)
    assert torch.equal(grad, before)


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(4, 6, 8, 8),  # channels first
        make_image(4, 16, 8, 8),  # torch's kernels are fast
        make_image(3, 6, 5, 5),  # an odd number of pixels
        make_image(4, 6, 8, 8).bfloat16(),
        torch.zeros(4, 6, 8),
    ],
)
def test_other_values_are_normalised_by_torch(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folded_norm, "MIN_PIXELS", 1)
    assert count_row_pixels(x) == 0


def test_small_images_are_normalised_by_torch() -> None:
    assert count_row_pixels(make_image(4, 6, 8, 8)) == 0


class DenseBlock(nn.Module):
    """Norms with and without a ReLU, of values that others read too."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first = nn.Conv2d(2, 10, 3, padding=1), nn.BatchNorm2d(10)
        self.grow, self.last = nn.Conv2d(10, 5, 3, padding=1), nn.BatchNorm2d(15)
        self.head = nn.Conv2d(15, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = torch.cat([x, self.grow(torch.relu(self.first(x)))], 1)
        out: Tensor = self.head(x + self.last(x)).mean((2, 3))
        return out


def test_an_elastic_network_with_folded_norms_passes_its_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(folded_norm, "MIN_PIXELS", 1)
    counts = []

    def count(x: Tensor) -> int:
        counts.append(count_row_pixels(x))
        return counts[-1]

    monkeypatch.setattr("pliant.nn.compiler.rules_norms.count_row_pixels", count)
    monkeypatch.setattr(folded_norm, "count_row_pixels", count)
    elastic(DenseBlock().double(), torch.randn(2, 2, 8, 8, dtype=torch.float64))  # checks itself
    assert any(counts)
