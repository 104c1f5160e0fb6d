import math

import pytest
import torch
from torch import nn

from pliant.nn.evaluation import evaluate_batches, make_slices


class TwoHeads(nn.Module):
    """Return the first pixels as logits, and something else."""

    def forward(self, x):
        assert not self.training
        return x.flatten(1)[:, :2], x


def test_totals_are_sums_over_the_batches():
    x, labels = torch.eye(2).view(2, 1, 1, 2), torch.tensor([0, 0])
    batches = ((x[rows], labels[rows]) for rows in make_slices(2, 1))
    net = TwoHeads().train()
    totals = evaluate_batches(net, {}, batches, classes=3)
    assert (totals.correct.tolist(), totals.total.tolist()) == ([1, 0, 0], [2, 0, 0])
    assert totals.num_correct == 1
    # logits (1, 0) and (0, 1), both of class 0: log(1 + 1/e) and log(1 + e)
    assert totals.loss == pytest.approx(math.log(1 + math.exp(-1)) + math.log(1 + math.e))
    whole = evaluate_batches(net, {}, [(x, labels)], classes=3)
    assert totals.loss == pytest.approx(whole.loss)
    assert net.training


def test_the_mode_is_restored_after_an_error():
    net = TwoHeads().train()
    with pytest.raises(RuntimeError):
        evaluate_batches(net, {}, [(torch.zeros(1, 1, 1, 2), torch.tensor([[0, 0]]))], classes=2)
    assert net.training


def test_slices_cover_all_rows():
    assert list(make_slices(5, 2)) == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert list(make_slices(0, 2)) == []


def test_a_frozen_layer_stays_in_evaluation_mode():
    net = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(2), nn.Dropout())
    net[1].eval()
    evaluate_batches(net, {}, [(torch.eye(2).view(2, 1, 1, 2), torch.tensor([0, 1]))], classes=2)
    assert [module.training for module in net.modules()] == [True, True, False, True]
