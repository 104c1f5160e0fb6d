import re

import numpy as np
import pytest
import torch

from pliant.data import ImageDataset

BYTES = torch.tensor([0, 255, 255, 0, 0, 0, 0, 0], dtype=torch.uint8).view(2, 1, 2, 2)
LABELS = torch.tensor([1, 0])


def test_bytes_are_normalised_by_mean_and_deviation():
    images = ImageDataset.from_tensors(BYTES, LABELS, mean=(0.5,), std=(0.25,))
    x = images.get_normalised(np.array([0]))
    assert x.dtype == torch.float32
    assert x.flatten().tolist() == [-2.0, 2.0, 2.0, -2.0]


def test_statistics_default_to_those_of_the_bytes():
    images = ImageDataset.from_tensors(BYTES, LABELS)
    assert images.mean == (0.25,)
    assert images.std[0] == pytest.approx(np.sqrt(3) / 4)
    x = images.get_normalised()
    assert x.mean().item() == pytest.approx(0.0, abs=1e-6)
    assert x.std(unbiased=False).item() == pytest.approx(1.0, abs=1e-6)


def test_a_channel_of_one_colour_can_be_normalised():
    images = ImageDataset.from_tensors(torch.full((2, 1, 2, 2), 7, dtype=torch.uint8), LABELS)
    assert torch.isfinite(images.get_normalised()).all()


def test_floats_are_not_changed():
    pixels = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    images = ImageDataset.from_tensors(pixels, LABELS)
    assert torch.equal(images.get_normalised(), pixels.float())
    assert torch.equal(images.pixels, pixels.float())


def test_a_selection_keeps_order_groups_and_statistics():
    images = ImageDataset.from_tensors(BYTES, LABELS, groups=torch.tensor([7, 9]), name="two")
    selected = images.select(np.array([1, 0, 1]))
    assert len(selected) == 3
    assert selected.labels.tolist() == [0, 1, 0]
    assert selected.groups is not None
    assert selected.groups.tolist() == [9, 7, 9]
    assert (selected.mean, selected.std, selected.classes, selected.name) == (
        images.mean,
        images.std,
        images.classes,
        "two",
    )
    assert selected.labels.bincount().tolist() == [2, 1]


def test_get_normalised_takes_a_slice():
    images = ImageDataset.from_tensors(BYTES, LABELS)
    assert torch.equal(images.get_normalised(slice(1, 2)), images.get_normalised()[1:2])


@pytest.mark.parametrize(
    ("pixels", "labels", "message"),
    [
        (torch.zeros(2, 4), LABELS, "mine: expected tokens as int64, got torch.float32"),
        (BYTES.int(), LABELS, "mine: expected images as uint8 or float, got torch.int32"),
        (BYTES, torch.tensor([0, 1, 1]), "mine: expected 2 labels as int64, got (3,)"),
        (
            BYTES,
            torch.tensor([0.0, 1.0]),
            "mine: expected integer labels, got torch.float",
        ),
        (BYTES, torch.tensor([0, 3]), "mine: expected labels from 0 to 2, got 3 at 1"),
        (BYTES, torch.tensor([-1, 0]), "mine: expected labels from 0 to 2, got -1 at 0"),
    ],
)
def test_a_wrong_pair_of_tensors_is_rejected(pixels, labels, message):
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        ImageDataset.from_tensors(pixels, labels, classes=3, mean=(0.0,), std=(1.0,), name="mine")


def test_statistics_must_match_the_channels():
    with pytest.raises(ValueError, match="expected 1 values of std, one per channel"):
        ImageDataset.from_tensors(BYTES, LABELS, mean=(0.0,), std=(1.0, 1.0))
    with pytest.raises(ValueError, match="expected std > 0"):
        ImageDataset.from_tensors(BYTES, LABELS, mean=(0.0,), std=(0.0,))
