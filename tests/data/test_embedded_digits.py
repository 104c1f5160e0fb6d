import os
from importlib.resources import files

import pytest
import torch

from pliant.data import digits, embedded_digits, mnist
from pliant.data.embedded_digits import SHA256, digits_status, unpack_digits
from pliant.data.images import channel_statistics


def packed():
    return files("pliant.data").joinpath("embedded", "digits.idx.xz").read_bytes()


def test_there_are_eight_thousand_and_two_thousand_digits():
    source = digits()
    assert source.train.counts() == (800,) * 10
    assert source.test.counts() == (200,) * 10
    assert source.train.shape == (1, 28, 28)
    assert source.train.pixels.dtype == torch.uint8
    assert len(packed()) <= 2_500_000


def test_the_digits_look_like_mnist():
    source = digits()
    mean, std = channel_statistics(source.train.pixels)
    assert mean[0] == pytest.approx(0.1307, abs=0.002)
    assert std[0] == pytest.approx(0.3081, abs=0.002)
    # the mean image of a digit tells most test images apart: these are digits, under right labels
    means = torch.stack(
        [source.train.normalised()[source.train.labels == n].mean(0) for n in range(10)]
    )
    distance = torch.cdist(source.test.normalised().flatten(1), means.flatten(1))
    assert (distance.argmin(1) == source.test.labels).float().mean() > 0.75


@pytest.mark.skipif(
    "PLIANT_DATA" not in os.environ, reason="PLIANT_DATA does not name a folder of data sets"
)
def test_the_digits_are_those_that_origin_says():
    for part, whole, count in zip(
        (digits().train, digits().test), (mnist().train, mnist().test), (800, 200), strict=True
    ):
        for digit in range(10):
            members = whole.pixels[whole.labels == digit]
            places = [i * len(members) // count for i in range(count)]
            assert torch.equal(part.pixels[part.labels == digit], members[places])


def test_a_damaged_file_is_refused():
    raw = bytearray(packed())
    raw[1000] ^= 1
    with pytest.raises(ValueError, match=f"digits.idx.xz: expected contents of SHA-256 {SHA256}"):
        unpack_digits(bytes(raw), SHA256)


def test_its_status_is_told_like_that_of_other_sets(monkeypatch):
    assert digits_status().state == "complete"
    monkeypatch.setattr(embedded_digits, "SHA256", "0" * 64)
    assert digits_status().state == "damaged"


def test_origin_and_licence_travel_along():
    text = files("pliant.data").joinpath("embedded", "ORIGIN.md").read_text()
    assert "LeCun" in text
    assert "creativecommons.org/licenses/by-sa/3.0" in text
