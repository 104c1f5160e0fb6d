import pytest
import torch
import torch.nn.functional as F

from pliant.nn.compiler import fast_lrn
from pliant.nn.compiler.fast_lrn import FastLrnMode, local_response_norm


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("beta", [0.75, 0.6])
def test_values_and_gradients_match_torch(size, beta):
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(2, 7, 3, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(2, 7, 3, 3, generator=generator, dtype=torch.float64)
    ours = local_response_norm(x, size, 0.3, beta, 1.5)
    theirs = F.local_response_norm(x, size, 0.3, beta, 1.5)
    assert torch.allclose(ours, theirs, rtol=1e-12)
    grads = [torch.autograd.grad((out * weights).sum(), x)[0] for out in (ours, theirs)]
    assert torch.allclose(*grads, rtol=1e-10)


def test_the_mode_replaces_the_norm_of_networks(monkeypatch):
    calls = []

    def count_calls(x, size, **options):
        calls.append((size, options))
        return local_response_norm(x, size, **options)

    monkeypatch.setattr(fast_lrn, "local_response_norm", count_calls)
    net = torch.nn.Sequential(torch.nn.LocalResponseNorm(4), torch.nn.Flatten())
    x = torch.randn(2, 5, 3, 3)
    with FastLrnMode():
        out = net(x)
    assert calls == [(4, {"alpha": 1e-4, "beta": 0.75, "k": 1.0})]
    assert torch.allclose(out, net(x), rtol=1e-5)
    assert len(calls) == 1  # not outside the mode
