"""Data that stays on devices: what a device declares about it is all that a server knows."""

from dataclasses import dataclass, field

import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray

from pliant.data.federated import FederatedData
from pliant.data.images import ImageDataset
from pliant.data.own_images import ImageForm


class DataDeclaration(Struct, frozen=True):
    """What a device tells of its data before a run; it holds for the whole run."""

    max_samples: int  # for training, in any round
    tests: int = 0  # images for testing
    classes: tuple[int, ...] | None = None  # None: hidden


@dataclass(frozen=True, eq=False)
class DeclaredData(FederatedData):
    """The data of a run as its server knows it: no training images, only declarations.

    >>> from pliant.data.declared import DataDeclaration, DeclaredData
    >>> from pliant.data.own_images import ImageForm
    >>> data = DeclaredData.make(ImageForm((1, 28, 28), ("cat", "dog")), devices=3)
    >>> data.declarations[1] = DataDeclaration(max_samples=50, classes=(0,))
    >>> len(data), len(data.train), data.count_samples(1), data.list_classes(1)
    (3, 0, 50, (0,))
    """

    devices: int = 0
    declarations: dict[int, DataDeclaration] = field(default_factory=dict)

    @staticmethod
    def make(
        form: ImageForm,
        devices: int,
        *,
        holdout: ImageDataset | None = None,
        proxy: ImageDataset | None = None,
    ) -> "DeclaredData":
        """Return the data of a server with these images of its own."""
        nothing = make_empty_images(form)
        no_indices = np.zeros(0, np.int64)
        return DeclaredData(
            nothing, holdout or nothing, proxy or nothing, (), no_indices, devices=devices
        )

    def __len__(self) -> int:
        return self.devices

    def get_share(self, device: int) -> NDArray[np.int64]:
        raise LookupError(f"device {device}: expected no use of its images, which are not here")

    def count_samples(self, device: int, now: float | None = None) -> int:
        declaration = self.declarations.get(device)
        return 0 if declaration is None else declaration.max_samples

    def list_classes(self, device: int, samples: int | None = None) -> tuple[int, ...]:
        declaration = self.declarations.get(device)
        return () if declaration is None else declaration.classes or ()


def make_empty_images(form: ImageForm) -> ImageDataset:
    """Return a data set without images."""
    pixels, labels = torch.empty((0, *form.shape), dtype=torch.uint8), torch.empty(0).long()
    return ImageDataset(pixels, labels, len(form.names), form.mean, form.std, name="no images")
