import pytest
import torch
import torch.nn.functional as F

from pliant.nn.response import Quick, local_response_norm


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("beta", [0.75, 0.6])
def test_values_and_gradients_are_those_of_torch(size, beta):
    draws = torch.Generator().manual_seed(size)
    x = torch.randn(2, 7, 3, 3, generator=draws, dtype=torch.float64, requires_grad=True)
    up = torch.randn(2, 7, 3, 3, generator=draws, dtype=torch.float64)
    ours = local_response_norm(x, size, 0.3, beta, 1.5)
    theirs = F.local_response_norm(x, size, 0.3, beta, 1.5)
    assert torch.allclose(ours, theirs, rtol=1e-12)
    slopes = [torch.autograd.grad((found * up).sum(), x)[0] for found in (ours, theirs)]
    assert torch.allclose(*slopes, rtol=1e-10)


def test_networks_can_be_run_with_it():
    net = torch.nn.Sequential(torch.nn.LocalResponseNorm(4), torch.nn.Flatten())
    x = torch.randn(2, 5, 3, 3)
    with Quick():
        found = net(x)
    assert torch.allclose(found, net(x), rtol=1e-5)
