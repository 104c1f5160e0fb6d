import math

import pytest
import torch

from pliant.split.client_module import nt_xent


def compute_nt_xent_by_definition(z, y, tau):
    """Sum over all pairs of an anchor a and a positive p."""
    z = torch.nn.functional.normalize(z)
    losses = []
    for a in range(len(y)):
        for p in range(len(y)):
            if a != p and y[a] == y[p]:
                positive = math.exp(float(z[a] @ z[p]) / tau)
                negatives = sum(
                    math.exp(float(z[a] @ z[n]) / tau) for n in range(len(y)) if y[n] != y[a]
                )
                losses.append(-math.log(positive / (positive + negatives)))
    return sum(losses) / len(losses) if losses else 0.0


@pytest.mark.parametrize("tau", [0.07, 1.0])
def test_the_loss_is_the_mean_over_pairs(tau):
    rng = torch.Generator().manual_seed(1)
    z = torch.randn(9, 4, generator=rng, dtype=torch.float64)
    y = torch.tensor([0, 0, 1, 2, 1, 0, 2, 2, 1])
    expected = compute_nt_xent_by_definition(z, y, tau)
    assert float(nt_xent(z, y, tau)) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("labels", [[4], [0, 1, 2], [3, 3, 3]])
def test_without_a_positive_pair_or_a_negative_the_loss_is_zero(labels):
    z = torch.randn(len(labels), 4, requires_grad=True)
    loss = nt_xent(z, torch.tensor(labels), 0.07)
    (gradient,) = torch.autograd.grad(loss, z)
    assert loss.item() == pytest.approx(0.0, abs=1e-6)
    assert torch.isfinite(gradient).all()
    assert float(gradient.abs().max()) < 1e-5
