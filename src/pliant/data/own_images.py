"""The images that a device or a server brings itself, in the form that a network expects."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from pliant.data.federated import TrainTestData
from pliant.data.formats.arrays import ARRAY_SUFFIXES, read_arrays
from pliant.data.formats.idx import pair_images_with_labels, read_idx
from pliant.data.formats.image_folder import read_class_folders
from pliant.data.images import ImageDataset

IDX_IMAGES, IDX_LABELS = "images-idx3-ubyte", "labels-idx1-ubyte"


class ImageForm(NamedTuple):
    """The images that a network is trained on: their shape, classes and normalisation."""

    shape: tuple[int, int, int]  # channel, h, w
    names: tuple[str, ...]  # of the classes
    mean: tuple[float, ...] = (0.0,)  # per channel, of bytes / 255 or of floats as they are
    std: tuple[float, ...] = (1.0,)


@dataclass(frozen=True, eq=False)
class OwnImages:
    """Images for training and, if they came apart, for testing."""

    train: ImageDataset
    test: ImageDataset | None = None


def read_own_images(path: Path, form: ImageForm) -> OwnImages:
    """Read a folder of class folders, idx, NPZ, CSV or Parquet files, or a single such file.

    Sub-folders `train` and `test`, if both exist, are the two parts.
    """
    if (path / "train").is_dir() and (path / "test").is_dir():
        return OwnImages(_read_part(path / "train", form), _read_part(path / "test", form))
    return OwnImages(_read_part(path, form))


def wrap_own_images(value: object, form: ImageForm, where: str) -> OwnImages:
    """Return what a user's function has returned in the network's form."""
    if isinstance(value, TrainTestData):
        return OwnImages(_fit(value.train, form, where), _fit(value.test, form, where))
    if isinstance(value, ImageDataset):
        return OwnImages(_fit(value, form, where))
    raise ValueError(
        f"{where}: expected a pliant.ImageDataset or a pliant.data.TrainTestData, "
        f"got {type(value).__name__}"
    )


def split_by_content(images: ImageDataset, test: float) -> TrainTestData:
    """Draw a test part by a hash of each image, so that an image never changes its part."""
    limit = int(test * 2**64)
    is_test = np.zeros(len(images), bool)
    for index in range(len(images)):
        content = images.pixels[index].contiguous().numpy().tobytes()
        is_test[index] = int.from_bytes(blake2b(content, digest_size=8).digest()) < limit
    train, tests = (images.select(np.flatnonzero(part)) for part in (~is_test, is_test))
    return TrainTestData(train, tests)


def _read_part(path: Path, form: ImageForm) -> ImageDataset:
    """Read all files of one kind, in the order of their names."""
    files = [path] if path.is_file() else sorted(path.glob("*"))
    arrays = [file for file in files if file.suffix in ARRAY_SUFFIXES]
    idx = [file for file in files if IDX_IMAGES in file.name]
    folders = [file for file in files if file.is_dir()]
    kinds = [kind for kind in (arrays, idx, folders) if kind]
    if len(kinds) != 1:
        problem = "several kinds" if kinds else "none"
        raise ValueError(
            f"{path}: expected one folder per class, idx, .npz, .csv or .parquet files, "
            f"found {problem}"
        )
    if folders:
        return _fit(read_class_folders(path, form.names), form, str(path))
    if arrays:
        return _join([_read_arrays(file, form) for file in arrays])
    return _join([_read_idx(file, form) for file in idx])


def _read_arrays(path: Path, form: ImageForm) -> ImageDataset:
    pixels, labels = (torch.from_numpy(array) for array in read_arrays(path))
    channels, *sides = form.shape
    accepted = [form.shape, (prod(form.shape),)] + ([tuple(sides)] if channels == 1 else [])
    if tuple(pixels.shape[1:]) not in accepted:
        raise ValueError(
            f"{path}: expected images of shape {form.shape}, got {tuple(pixels.shape[1:])}"
        )
    return _make_images(pixels.reshape(-1, *form.shape), labels, form, str(path))


def _read_idx(path: Path, form: ImageForm) -> ImageDataset:
    labels = read_idx(path.with_name(path.name.replace(IDX_IMAGES, IDX_LABELS)))
    return _make_images(*pair_images_with_labels(read_idx(path), labels, path), form, str(path))


def _fit(images: ImageDataset, form: ImageForm, where: str) -> ImageDataset:
    return _make_images(images.pixels, images.labels, form, where)


def _make_images(
    pixels: torch.Tensor, labels: torch.Tensor, form: ImageForm, where: str
) -> ImageDataset:
    if tuple(pixels.shape[1:]) != form.shape:
        raise ValueError(f"{where}: expected images {form.shape}, got {tuple(pixels.shape[1:])}")
    return ImageDataset(pixels, labels, len(form.names), form.mean, form.std, name=where)


def _join(parts: Sequence[ImageDataset]) -> ImageDataset:
    first = parts[0]
    if len({part.pixels.dtype for part in parts}) > 1:
        raise ValueError(f"{first.name}: expected all files with bytes or all with floats")
    pixels, labels = (
        torch.cat([getattr(part, name) for part in parts]) for name in ("pixels", "labels")
    )
    return ImageDataset(pixels, labels, first.classes, first.mean, first.std, name=first.name)
