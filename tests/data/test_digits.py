import importlib
import os
from importlib.resources import files

import pytest
import torch

from pliant.data import digits, mnist
from pliant.data.digits import SHA256, inspect_digits, unpack_digits
from pliant.data.images import compute_channel_statistics


def read_packed():
    return files("pliant.data").joinpath("embedded", "digits.idx.xz").read_bytes()


def test_there_are_8000_training_and_2000_test_digits():
    source = digits()
    assert source.train.class_counts() == (800,) * 10
    assert source.test.class_counts() == (200,) * 10
    assert source.train.shape == (1, 28, 28)
    assert source.train.pixels.dtype == torch.uint8
    assert len(read_packed()) <= 2_500_000


def test_the_digits_look_like_mnist():
    source = digits()
    mean, std = compute_channel_statistics(source.train.pixels)
    assert mean[0] == pytest.approx(0.1307, abs=0.002)
    assert std[0] == pytest.approx(0.3081, abs=0.002)
    # the nearest mean image classifies most test images, so these are digits with the right labels
    means = torch.stack(
        [source.train.get_normalised()[source.train.labels == n].mean(0) for n in range(10)]
    )
    distance = torch.cdist(source.test.get_normalised().flatten(1), means.flatten(1))
    assert (distance.argmin(1) == source.test.labels).float().mean() > 0.75


@pytest.mark.skipif(
    "PLIANT_DATA" not in os.environ, reason="PLIANT_DATA does not name a folder of data sets"
)
def test_the_digits_are_those_named_in_origin():
    for part, mnist_part, count in zip(
        (digits().train, digits().test), (mnist().train, mnist().test), (800, 200), strict=True
    ):
        for digit in range(10):
            members = mnist_part.pixels[mnist_part.labels == digit]
            indices = [i * len(members) // count for i in range(count)]
            assert torch.equal(part.pixels[part.labels == digit], members[indices])


def test_a_damaged_file_is_rejected():
    raw = bytearray(read_packed())
    raw[1000] ^= 1
    with pytest.raises(ValueError, match=f"digits.idx.xz: expected SHA-256 {SHA256}"):
        unpack_digits(bytes(raw), SHA256)


def test_a_damaged_file_is_reported(monkeypatch):
    assert inspect_digits().state == "complete"
    monkeypatch.setattr(importlib.import_module("pliant.data.digits"), "SHA256", "0" * 64)
    assert inspect_digits().state == "damaged"


def test_origin_and_licence_are_included():
    text = files("pliant.data").joinpath("embedded", "ORIGIN.md").read_text()
    assert "LeCun" in text
    assert "creativecommons.org/licenses/by-sa/3.0" in text
