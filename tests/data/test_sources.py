import gzip
import hashlib
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from pliant.data import (
    cifar10,
    cifar100,
    digits,
    fashion_mnist,
    load_dataset,
    mnist,
    notmnist,
)
from pliant.data.download import published
from pliant.data.download.cache import inspect_dataset
from pliant.data.download.published import DIGITS, DataFile, DatasetManifest
from pliant.data.formats.idx import encode_idx
from pliant.data.images import compute_channel_statistics
from pliant.data.sources import DATASETS, find_dataset

needs_data = pytest.mark.skipif(
    "PLIANT_DATA" not in os.environ, reason="PLIANT_DATA does not name a folder of data sets"
)


def write_idx(folder: Path, part: str, labels: list[int], *, is_packed: bool) -> list[DataFile]:
    """Write a pair of idx files; return their names and digests."""
    folder.mkdir(parents=True, exist_ok=True)
    pixels = torch.arange(len(labels) * 4, dtype=torch.uint8).view(-1, 2, 2)
    files = []
    for name, items in (
        (f"{part}-images-idx3-ubyte", pixels),
        (f"{part}-labels-idx1-ubyte", torch.tensor(labels, dtype=torch.uint8)),
    ):
        raw = encode_idx(items)
        path = folder / (f"{name}.gz" if is_packed else name)
        path.write_bytes(gzip.compress(raw) if is_packed else raw)
        files.append(DataFile(name, hashlib.sha256(raw).hexdigest()))
    return files


def make_manifest(name: str, files: list[DataFile]) -> DatasetManifest:
    return DatasetManifest(name, "A small set", name, tuple(files))


@pytest.fixture
def small_root(tmp_path, monkeypatch):
    files = write_idx(tmp_path / "mnist", "train", [3, 9, 0], is_packed=True)
    files += write_idx(tmp_path / "mnist", "t10k", [1], is_packed=False)
    monkeypatch.setattr(published, "MNIST", make_manifest("mnist", files))
    return tmp_path


def test_packed_and_plain_files_are_read(small_root):
    source = mnist(small_root)
    assert source.train.labels.tolist() == [3, 9, 0]
    assert source.train.pixels[1].flatten().tolist() == [4, 5, 6, 7]
    assert source.test.labels.tolist() == [1]
    assert source.train.groups is None
    assert mnist(small_root / "mnist").train.labels.tolist() == [3, 9, 0]


def test_writers_become_groups(small_root):
    np.savez(small_root / "mnist" / "writer_ids.npz", train_writer=[8, 8, 2], test_writer=[5])
    source = mnist(small_root)
    assert source.train.groups is not None
    assert source.train.groups.tolist() == [8, 8, 2]


def test_a_changed_file_is_rejected(small_root):
    path = small_root / "mnist" / "t10k-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(ValueError, match="t10k-images-idx3-ubyte: expected SHA-256"):
        mnist(small_root)


def test_a_label_out_of_range_is_rejected(tmp_path, monkeypatch):
    files = write_idx(tmp_path / "notmnist", "t10k", [3, 10], is_packed=False)
    monkeypatch.setattr(published, "NOTMNIST", make_manifest("notmnist", files))
    with pytest.raises(
        ValueError, match="t10k-labels-idx1-ubyte: expected labels from 0 to 9, got 10"
    ):
        notmnist(tmp_path)


def test_notmnist_is_split_by_the_seed(tmp_path, monkeypatch):
    files = write_idx(tmp_path / "notmnist", "t10k", list(range(10)) * 5, is_packed=True)
    monkeypatch.setattr(published, "NOTMNIST", make_manifest("notmnist", files))
    source, same, other = (notmnist(tmp_path, seed=seed) for seed in (0, 0, 1))
    assert (len(source.train), len(source.test)) == (40, 10)
    assert torch.equal(source.test.pixels, same.test.pixels)
    assert not torch.equal(source.test.pixels, other.test.pixels)


@pytest.mark.parametrize("load", [mnist, fashion_mnist, notmnist, cifar10, cifar100])
def test_the_error_for_a_missing_set_names_file_and_command(load, tmp_path):
    with pytest.raises(FileNotFoundError, match=f"{tmp_path}.*pliant data get {load.__name__}"):
        load(tmp_path)


@needs_data
def test_cifar10_agrees_with_its_published_statistics():
    source = cifar10()
    assert source.train.labels.bincount().tolist() == [5000] * 10
    assert source.test.labels.bincount().tolist() == [1000] * 10
    mean, std = compute_channel_statistics(source.train.pixels)
    assert mean == pytest.approx((0.4914, 0.4822, 0.4465), abs=1e-4)
    assert std == pytest.approx(source.train.std, abs=1e-4)


@needs_data
@pytest.mark.parametrize(
    ("load", "classes", "test"),
    [(mnist, 10, 10_000), (fashion_mnist, 10, 10_000), (notmnist, 10, 2000)],
)
def test_grey_sets_agree_with_their_statistics(load, classes, test):
    source = load()
    assert len(source.test) == test
    mean, std = compute_channel_statistics(source.train.pixels)
    assert mean == pytest.approx(source.train.mean, abs=1e-3)
    assert std == pytest.approx(source.train.std, abs=1e-3)
    assert source.train.labels.bincount().min() > 0
    assert source.train.classes == classes


@needs_data
def test_cifar100_has_500_training_images_per_class():
    source = cifar100()
    assert source.train.labels.bincount().tolist() == [500] * 100
    assert source.test.labels.bincount().tolist() == [100] * 100
    mean, std = compute_channel_statistics(source.train.pixels)
    assert mean == pytest.approx(source.train.mean, abs=1e-4)
    assert std == pytest.approx(source.train.std, abs=1e-4)


def test_a_source_is_loaded_by_its_name():
    assert len(load_dataset("digits").train) == 8000
    with pytest.raises(LookupError, match=r"expected one of digits, .*, got 'imagenet'"):
        load_dataset("imagenet")


def test_every_name_is_that_of_the_loader_and_of_the_manifest():
    for name, dataset in DATASETS.items():
        assert find_dataset(name) is dataset
        assert dataset.load.__name__ == dataset.manifest.name == name


def test_there_are_8000_training_and_2000_test_digits():
    source = digits()
    assert source.train.labels.bincount().tolist() == [800] * 10
    assert source.test.labels.bincount().tolist() == [200] * 10
    assert source.train.shape == (1, 28, 28)
    assert source.train.pixels.dtype == torch.uint8
    assert Path(DIGITS.folder, "digits.idx.xz").stat().st_size <= 2_500_000


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


@needs_data
def test_the_digits_are_those_named_in_origin():
    for part, mnist_part, count in zip(
        (digits().train, digits().test), (mnist().train, mnist().test), (800, 200), strict=True
    ):
        for digit in range(10):
            members = mnist_part.pixels[mnist_part.labels == digit]
            indices = [i * len(members) // count for i in range(count)]
            assert torch.equal(part.pixels[part.labels == digit], members[indices])


def test_damaged_digits_are_reported_and_rejected(tmp_path, monkeypatch):
    assert inspect_dataset(DIGITS, tmp_path).state == "complete"
    raw = bytearray(Path(DIGITS.folder, "digits.idx.xz").read_bytes())
    raw[1000] ^= 1
    (tmp_path / "digits.idx.xz").write_bytes(raw)
    damaged = DatasetManifest("digits", "", str(tmp_path), DIGITS.files)
    assert inspect_dataset(damaged, tmp_path).state == "damaged"
    monkeypatch.setattr(published, "DIGITS", damaged)
    with pytest.raises(ValueError, match=r"digits.idx.xz: expected SHA-256 19bdc258"):
        digits()


def test_origin_and_licence_of_the_digits_are_included():
    text = Path(DIGITS.folder, "ORIGIN.md").read_text()
    assert "LeCun" in text
    assert "creativecommons.org/licenses/by-sa/3.0" in text
