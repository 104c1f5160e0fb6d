import re

import numpy as np
import pytest
import torch

from pliant.data import Images

BYTES = torch.tensor([0, 255, 255, 0, 0, 0, 0, 0], dtype=torch.uint8).view(2, 1, 2, 2)
LABELS = torch.tensor([1, 0])


def test_bytes_become_floats_by_mean_and_deviation():
    images = Images.from_tensors(BYTES, LABELS, mean=(0.5,), std=(0.25,))
    x = images.normalised(np.array([0]))
    assert x.dtype == torch.float32
    assert x.flatten().tolist() == [-2.0, 2.0, 2.0, -2.0]


def test_statistics_come_from_the_bytes_when_they_are_not_given():
    images = Images.from_tensors(BYTES, LABELS)
    assert images.mean == (0.25,)
    assert images.std[0] == pytest.approx(np.sqrt(3) / 4)
    x = images.normalised()
    assert x.mean().item() == pytest.approx(0.0, abs=1e-6)
    assert x.std(unbiased=False).item() == pytest.approx(1.0, abs=1e-6)


def test_a_channel_of_one_colour_can_be_normalised():
    images = Images.from_tensors(torch.full((2, 1, 2, 2), 7, dtype=torch.uint8), LABELS)
    assert torch.isfinite(images.normalised()).all()


def test_floats_are_kept_as_they_are():
    pixels = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    images = Images.from_tensors(pixels, LABELS)
    assert torch.equal(images.normalised(), pixels.float())
    assert torch.equal(images.pixels, pixels.float())


def test_a_subset_keeps_order_groups_and_statistics():
    images = Images.from_tensors(BYTES, LABELS, groups=torch.tensor([7, 9]), name="two")
    other = images.subset(np.array([1, 0, 1]))
    assert len(other) == 3
    assert other.labels.tolist() == [0, 1, 0]
    assert other.groups is not None
    assert other.groups.tolist() == [9, 7, 9]
    assert (other.mean, other.std, other.classes, other.name) == (
        images.mean,
        images.std,
        images.classes,
        "two",
    )
    assert other.counts() == (2, 1)


def test_normalised_takes_a_slice():
    images = Images.from_tensors(BYTES, LABELS)
    assert torch.equal(images.normalised(slice(1, 2)), images.normalised()[1:2])


@pytest.mark.parametrize(
    ("pixels", "labels", "said"),
    [
        (torch.zeros(2, 4), LABELS, "mine: expected images (n, channel, h, w), got (2, 4)"),
        (BYTES.int(), LABELS, "mine: expected images as uint8 or float, got torch.int32"),
        (BYTES, torch.tensor([0, 1, 1]), "mine: expected 2 labels as int64, got (3,)"),
        (
            BYTES,
            torch.tensor([0.0, 1.0]),
            "mine: expected whole numbers as labels, got torch.float",
        ),
        (BYTES, torch.tensor([0, 3]), "mine: expected labels from 0 to 2, got 3 at 1"),
        (BYTES, torch.tensor([-1, 0]), "mine: expected labels from 0 to 2, got -1 at 0"),
    ],
)
def test_a_wrong_pair_of_tensors_is_refused(pixels, labels, said):
    with pytest.raises(ValueError, match="^" + re.escape(said)):
        Images.from_tensors(pixels, labels, classes=3, mean=(0.0,), std=(1.0,), name="mine")


def test_statistics_must_fit_the_channels():
    with pytest.raises(ValueError, match="expected 1 values of std, one a channel"):
        Images.from_tensors(BYTES, LABELS, mean=(0.0,), std=(1.0, 1.0))
    with pytest.raises(ValueError, match="expected std > 0"):
        Images.from_tensors(BYTES, LABELS, mean=(0.0,), std=(0.0,))
