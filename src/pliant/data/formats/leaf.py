"""LEAF's FEMNIST format: folders of JSON files with users, their sample counts and their data.

Caldas et al., "LEAF: A Benchmark for Federated Settings", 2018.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pliant.data.images import check_labels

IMAGE_SIZE = 28 * 28


class _LeafFile(msgspec.Struct):
    users: list[str]
    num_samples: list[int]
    user_data: dict[str, msgspec.Raw]  # parsed one by one: objects take 20x the memory


class _UserSamples(msgspec.Struct):
    x: list[list[float]]
    y: list[int]


def read_leaf(folder: Path, classes: int) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """Read all JSON files of a folder; return the bytes, label and user of each image."""
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise FileNotFoundError(f"{folder}: expected LEAF files (all_data_*.json), got none")
    pixels: list[NDArray[np.uint8]] = []
    labels: list[Tensor] = []
    users: list[str] = []
    for path in paths:
        for user, samples in _iter_users(path):
            pixels.append(_convert_pixels(samples.x, f"{path}: user {user}"))
            labels.append(torch.tensor(samples.y, dtype=torch.int64))
            check_labels(labels[-1], classes, f"{path}: user {user}")
            users.extend([user] * len(samples.y))
    grey = torch.from_numpy(np.concatenate(pixels)).view(-1, 1, 28, 28)
    return grey, torch.cat(labels), tuple(users)


def number_users(*users: tuple[str, ...]) -> tuple[Tensor, ...]:
    """Number users by name, consistently across all parts."""
    numbers = {name: number for number, name in enumerate(sorted(set().union(*users)))}
    return tuple(
        torch.tensor([numbers[name] for name in part], dtype=torch.int64) for part in users
    )


def _iter_users(path: Path) -> Iterator[tuple[str, _UserSamples]]:
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_LeafFile)
        if not file.users:
            raise ValueError(f"{path}: expected at least one user, got none")
        if len(file.users) != len(file.num_samples):
            raise ValueError(
                f"{path}: expected {len(file.users)} num_samples, got {len(file.num_samples)}"
            )
        for user, count in zip(file.users, file.num_samples, strict=True):
            if user not in file.user_data:
                raise ValueError(f"{path}: expected user_data of user {user}, got none")
            samples = msgspec.json.decode(file.user_data[user], type=_UserSamples)
            if not len(samples.x) == len(samples.y) == count:
                raise ValueError(
                    f"{path}: expected {count} samples of user {user}, "
                    f"got {len(samples.x)} images and {len(samples.y)} labels"
                )
            yield user, samples
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: expected LEAF's JSON, got {error}") from None


def _convert_pixels(rows: list[list[float]], where: str) -> NDArray[np.uint8]:
    wrong = next((len(row) for row in rows if len(row) != IMAGE_SIZE), None)
    if wrong is not None:
        raise ValueError(f"{where}: expected images of {IMAGE_SIZE} numbers, got {wrong}")
    values = np.asarray(rows, np.float64).reshape(-1, IMAGE_SIZE)
    if values.size and not (values.min() >= 0.0 and values.max() <= 1.0):
        raise ValueError(
            f"{where}: expected pixels from 0 to 1, got {values.min()} to {values.max()}"
        )
    return np.rint(values * 255).astype(np.uint8)  # LEAF stores bytes / 255
