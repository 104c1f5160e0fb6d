import gzip
import hashlib
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from pliant.data import cifar10, cifar100, fashion_mnist, mnist, named, notmnist
from pliant.data.idx import to_idx
from pliant.data.images import channel_statistics
from pliant.data.published import File, Published

needs_data = pytest.mark.skipif(
    "PLIANT_DATA" not in os.environ, reason="PLIANT_DATA does not name a folder of data sets"
)


def write_idx(folder: Path, part: str, labels: list[int], *, is_packed: bool) -> list[File]:
    """Write a pair of idx files; return what pins them."""
    folder.mkdir(parents=True, exist_ok=True)
    pixels = torch.arange(len(labels) * 4, dtype=torch.uint8).view(-1, 2, 2)
    files = []
    for name, items in (
        (f"{part}-images-idx3-ubyte", pixels),
        (f"{part}-labels-idx1-ubyte", torch.tensor(labels, dtype=torch.uint8)),
    ):
        raw = to_idx(items)
        path = folder / (f"{name}.gz" if is_packed else name)
        path.write_bytes(gzip.compress(raw) if is_packed else raw)
        files.append(File(name, hashlib.sha256(raw).hexdigest()))
    return files


def pinned(name: str, folder: str, files: list[File]) -> Published:
    return Published(name, "a small one", folder, tuple(files), ())


@pytest.fixture
def small(tmp_path, monkeypatch):
    files = write_idx(tmp_path / "mnist", "train", [3, 9, 0], is_packed=True)
    files += write_idx(tmp_path / "mnist", "t10k", [1], is_packed=False)
    monkeypatch.setattr(named, "MNIST", pinned("mnist", "mnist", files))
    return tmp_path


def test_packed_and_plain_files_are_read(small):
    source = mnist(small)
    assert source.train.labels.tolist() == [3, 9, 0]
    assert source.train.pixels[1].flatten().tolist() == [4, 5, 6, 7]
    assert source.test.labels.tolist() == [1]
    assert source.train.groups is None
    assert mnist(small / "mnist").train.labels.tolist() == [3, 9, 0]


def test_writers_become_groups(small):
    np.savez(small / "mnist" / "writer_ids.npz", train_writer=[8, 8, 2], test_writer=[5])
    source = mnist(small)
    assert source.train.groups is not None
    assert source.train.groups.tolist() == [8, 8, 2]


def test_a_changed_file_is_refused(small):
    path = small / "mnist" / "t10k-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(ValueError, match="t10k-images-idx3-ubyte: expected contents of SHA-256"):
        mnist(small)


def test_a_label_out_of_range_is_refused(tmp_path, monkeypatch):
    files = write_idx(tmp_path / "notmnist", "t10k", [3, 10], is_packed=False)
    monkeypatch.setattr(named, "NOTMNIST", pinned("notmnist", "notmnist", files))
    with pytest.raises(
        ValueError, match="t10k-labels-idx1-ubyte: expected labels from 0 to 9, got 10"
    ):
        notmnist(tmp_path)


def test_notmnist_is_split_by_the_seed(tmp_path, monkeypatch):
    files = write_idx(tmp_path / "notmnist", "t10k", list(range(10)) * 5, is_packed=True)
    monkeypatch.setattr(named, "NOTMNIST", pinned("notmnist", "notmnist", files))
    one, same, other = (notmnist(tmp_path, seed=seed) for seed in (0, 0, 1))
    assert (len(one.train), len(one.test)) == (40, 10)
    assert torch.equal(one.test.pixels, same.test.pixels)
    assert not torch.equal(one.test.pixels, other.test.pixels)


@pytest.mark.parametrize("load", [mnist, fashion_mnist, notmnist, cifar10, cifar100])
def test_a_missing_set_says_which_file_is_expected_where(load, tmp_path):
    with pytest.raises(FileNotFoundError, match=f"{tmp_path}.*pliant data get {load.__name__}"):
        load(tmp_path)


@needs_data
def test_cifar10_agrees_with_what_is_published():
    source = cifar10()
    assert source.train.counts() == (5000,) * 10
    assert source.test.counts() == (1000,) * 10
    mean, std = channel_statistics(source.train.pixels)
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
    mean, std = channel_statistics(source.train.pixels)
    assert mean == pytest.approx(source.train.mean, abs=1e-3)
    assert std == pytest.approx(source.train.std, abs=1e-3)
    assert min(source.train.counts()) > 0
    assert source.train.classes == classes


@needs_data
def test_cifar100_has_five_hundred_images_a_class():
    source = cifar100()
    assert source.train.counts() == (500,) * 100
    assert source.test.counts() == (100,) * 100
    mean, std = channel_statistics(source.train.pixels)
    assert mean == pytest.approx(source.train.mean, abs=1e-4)
    assert std == pytest.approx(source.train.std, abs=1e-4)
