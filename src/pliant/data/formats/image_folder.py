"""A folder of image files with one sub-folder per class."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pliant.data.federated import TrainTestData, split_train_test
from pliant.data.images import ImageDataset
from pliant.extras import require

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp"})
GREY_MODES = frozenset({"1", "L"})
COLOUR_MODES = frozenset({"P", "RGB", "RGBA", "LA", "PA", "CMYK", "YCbCr"})


def image_folder(path: str | Path, *, test: float = 0.2, seed: int = 0) -> TrainTestData:
    """Read images whose class is their sub-folder.

    Sub-folders `train` and `test`, if both exist, are the two parts; otherwise the share `test` is
    drawn by the seed.
    """
    path = Path(path)
    if (path / "train").is_dir() and (path / "test").is_dir():
        names = _list_class_names(path / "train")
        train = read_class_folders(path / "train", names)
        raw = read_class_folders(path / "test", names)
        if raw.shape != train.shape:
            raise ValueError(f"{path}: expected test images {train.shape}, got {raw.shape}")
        return TrainTestData(train, replace(raw, mean=train.mean, std=train.std, name=path.name))
    return split_train_test(read_class_folders(path, _list_class_names(path)), test=test, seed=seed)


def _list_class_names(path: Path) -> list[str]:
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: expected a folder with one sub-folder per class")
    names = sorted(child.name for child in path.iterdir() if child.is_dir())
    if not names:
        raise ValueError(f"{path}: expected one sub-folder per class, got none")
    return names


def read_class_folders(path: Path, names: Sequence[str]) -> ImageDataset:
    """Read images whose class is the place of their sub-folder in `names`."""
    if extra := sorted(set(_list_class_names(path)) - set(names)):
        raise ValueError(f"{path}: expected the classes {list(names)}, also got {extra}")
    files = [
        (file, label)
        for label, name in enumerate(names)
        for file in sorted((path / name).glob("*"))
        if file.suffix.lower() in IMAGE_SUFFIXES
    ]
    if not files:
        raise ValueError(f"{path}: expected image files in its sub-folders, got none")
    pixels = _decode_images([file for file, _ in files])
    labels = torch.tensor([label for _, label in files], dtype=torch.int64)
    return ImageDataset.from_tensors(pixels, labels, classes=len(names), name=path.name)


def _decode_images(files: Sequence[Path]) -> Tensor:
    pillow = require("PIL.Image", "images")
    headers = [_read_size_and_mode(pillow, file) for file in files]
    size = headers[0][0]
    for file, (other, _) in zip(files, headers, strict=True):
        if other != size:
            raise ValueError(
                f"{file}: expected {size[0]}x{size[1]} pixels as in {files[0].name}, "
                f"got {other[0]}x{other[1]}"
            )
    mode = "L" if all(mode in GREY_MODES for _, mode in headers) else "RGB"
    width, height = size
    pixels = torch.empty((len(files), len(mode), height, width), dtype=torch.uint8)
    for number, file in enumerate(files):
        try:
            with pillow.open(file) as image:
                array = np.array(image.convert(mode), np.uint8)
        except (OSError, SyntaxError) as error:  # the errors Pillow raises for broken files
            raise ValueError(f"{file}: expected a complete image file, got {error}") from None
        pixels[number] = torch.from_numpy(array).view(height, width, len(mode)).permute(2, 0, 1)
    return pixels


def _read_size_and_mode(pillow: Any, file: Path) -> tuple[tuple[int, int], str]:
    try:
        with pillow.open(file) as image:
            size, mode = image.size, image.mode
    except (OSError, SyntaxError):
        raise ValueError(f"{file}: expected an image file, got something else") from None
    if mode not in GREY_MODES | COLOUR_MODES:
        raise ValueError(f"{file}: expected 8 bits per channel, got mode {mode}")
    return size, mode
