"""Batch norm with a ReLU in one step gives the numbers of the two, to the bit."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pliant.nn.compiler import norm_relu
from pliant.nn.elastic import elastic
from pliant.params import get_params


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3)
    )


def compute_gradients(run: Callable[[dict[str, Tensor]], Tensor], net: nn.Module) -> list[Tensor]:
    params = get_params(net)
    leaves = [params[name].requires_grad_() for name, _ in net.named_parameters()]
    out = run(params)
    return [out, *torch.autograd.grad(out.square().sum(), leaves), *params.values()]


@pytest.mark.parametrize("training", [True, False])
def test_a_fused_relu_changes_no_bit(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = make_net(), torch.randn(4, 2, 9, 9)
    net[1].train(training)
    elastic_net = elastic(net, x[:2])
    results = []
    for min_size in (1, x.numel() * 100):
        monkeypatch.setattr(norm_relu, "MIN_SIZE", min_size)
        results.append(
            compute_gradients(lambda params: elastic_net.run(params, elastic_net.full, x), net)
        )
    assert all(torch.equal(fused, apart) for fused, apart in zip(*results, strict=True))


def test_a_gradient_of_the_gradient_flows_through_a_fused_relu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(norm_relu, "MIN_SIZE", 1)
    values = [torch.randn(3, 2, 2, 2, dtype=torch.float64, requires_grad=True)]
    values += [torch.rand(2, dtype=torch.float64, requires_grad=True) for _ in range(2)]

    def run(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return norm_relu.batch_norm_relu(x, None, None, weight, bias, momentum=0.0, eps=1e-5)

    assert torch.autograd.gradcheck(run, values)
    assert torch.autograd.gradgradcheck(run, values)


def test_a_relu_whose_gradient_is_shared_is_not_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3)
            self.second, self.third = nn.Conv2d(2, 3, 1), nn.Conv2d(3, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.third(self.second(x) + torch.relu(self.norm(self.first(x))))
            return out

    monkeypatch.setattr(norm_relu, "MIN_SIZE", 1)
    elastic(Residual().double(), torch.randn(2, 2, 5, 5, dtype=torch.float64))  # checks itself
