"""A folder of image files, one sub-folder a class."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pliant.data.federated import Source, split_source
from pliant.data.images import Images
from pliant.extras import need

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp"})
GREY = frozenset({"1", "L"})
COLOUR = frozenset({"P", "RGB", "RGBA", "LA", "PA", "CMYK", "YCbCr"})


def folder(path: Path, *, test: float = 0.2, seed: int = 0) -> Source:
    """Read images whose class is the name of their sub-folder.

    Where the folder has `train` and `test` inside, these are the two parts; otherwise a share of
    `test` is drawn by the seed.
    """
    path = Path(path)
    if (path / "train").is_dir() and (path / "test").is_dir():
        names = _class_names(path / "train")
        train = _read(path / "train", names)
        other = _read(path / "test", names)
        if other.shape != train.shape:
            raise ValueError(f"{path}: expected test images {train.shape}, got {other.shape}")
        same = Images(
            other.pixels, other.labels, other.classes, train.mean, train.std, name=path.name
        )
        return Source(train=train, test=same)
    return split_source(_read(path, _class_names(path)), test=test, seed=seed)


def _class_names(path: Path) -> list[str]:
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: expected a folder with one sub-folder a class")
    names = sorted(child.name for child in path.iterdir() if child.is_dir())
    if not names:
        raise ValueError(f"{path}: expected one sub-folder a class, got none")
    return names


def _read(path: Path, names: Sequence[str]) -> Images:
    if extra := sorted(set(_class_names(path)) - set(names)):
        raise ValueError(f"{path}: expected the classes {list(names)}, got also {extra}")
    files = [
        (file, label)
        for label, name in enumerate(names)
        for file in sorted((path / name).glob("*"))
        if file.suffix.lower() in SUFFIXES
    ]
    if not files:
        raise ValueError(f"{path}: expected image files in its sub-folders, got none")
    pixels = _decode([file for file, _ in files])
    labels = torch.tensor([label for _, label in files], dtype=torch.int64)
    return Images.from_tensors(pixels, labels, classes=len(names), name=path.name)


def _decode(files: Sequence[Path]) -> Tensor:
    pillow = need("PIL.Image", "images")
    kinds = [_kind(pillow, file) for file in files]
    size = kinds[0][0]
    for file, (other, _) in zip(files, kinds, strict=True):
        if other != size:
            raise ValueError(
                f"{file}: expected {size[0]}x{size[1]} pixels as in {files[0].name}, "
                f"got {other[0]}x{other[1]}"
            )
    mode = "L" if all(mode in GREY for _, mode in kinds) else "RGB"
    width, height = size
    pixels = torch.empty((len(files), len(mode), height, width), dtype=torch.uint8)
    for number, file in enumerate(files):
        try:
            with pillow.open(file) as image:
                array = np.array(image.convert(mode), np.uint8)
        except (OSError, SyntaxError) as error:  # Pillow's two ways to refuse a file
            raise ValueError(f"{file}: expected a whole image file, got {error}") from None
        pixels[number] = torch.from_numpy(array).view(height, width, len(mode)).permute(2, 0, 1)
    return pixels


def _kind(pillow: Any, file: Path) -> tuple[tuple[int, int], str]:
    try:
        with pillow.open(file) as image:
            size, mode = image.size, image.mode
    except (OSError, SyntaxError):
        raise ValueError(f"{file}: expected an image file, got something else") from None
    if mode not in GREY | COLOUR:
        raise ValueError(f"{file}: expected 8 bits a channel, got mode {mode}")
    return size, mode
