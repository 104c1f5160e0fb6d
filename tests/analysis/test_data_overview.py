import numpy as np
import pytest
import torch

from pliant.analysis.data_overview import plot_partition
from pliant.data import FederatedData, ImageDataset
from pliant.data.partition import class_counts

SHARES = (np.array([0, 1, 2]), np.array([3]))
LABELS = np.array([0, 1, 1, 2])


def test_classes_are_counted_for_each_device():
    assert class_counts(SHARES, LABELS, 4).tolist() == [[1, 2, 0, 0], [0, 0, 1, 0]]


@pytest.mark.parametrize(("suffix", "prefix"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_the_suffix_sets_the_image_format(tmp_path, suffix, prefix):
    pytest.importorskip("matplotlib")
    images = ImageDataset.from_tensors(torch.zeros(4, 1, 2, 2), torch.from_numpy(LABELS), classes=4)
    none = np.arange(0)
    data = FederatedData(images, images, images.select(none), SHARES, none)
    path = plot_partition(data, tmp_path / f"shares.{suffix}")
    assert path.read_bytes().startswith(prefix)
    assert [file.name for file in tmp_path.iterdir()] == [f"shares.{suffix}"]
