"""The data that a device's owner gives it; it stays on the device."""

from pathlib import Path
from typing import Any

import numpy as np

from pliant.data import FederatedData, TrainTestData
from pliant.data.declared import DataDeclaration, make_empty_images
from pliant.data.own_images import ImageForm, split_by_content
from pliant.deploy.device.host import Limits, ReportableProblem
from pliant.experiment.build import load_own_images
from pliant.experiment.user_code import is_user_function
from pliant.methods.base import TaskKey
from pliant.rng import rng_stream


class OwnDataReader:
    """Read the owner's data, again whenever its files change; a function is called every time."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._version: Any = None
        self._data: TrainTestData | None = None

    def read(self, form: ImageForm) -> TrainTestData:
        """Return the images as they are now, divided into a training and a test part."""
        source = self._limits.dataset or self._limits.data
        if source is None:
            raise ReportableProblem(
                "expected --data FOLDER or --dataset FILE.py:FUNCTION on the device"
            )
        version = None if is_user_function(source) else (form, _list_files(Path(source)))
        if self._data is None or version is None or version != self._version:
            images = load_own_images(source, form)
            if images.test is not None:
                self._data = TrainTestData(images.train, images.test)
            else:
                self._data = split_by_content(images.train, self._limits.test_share)
            self._version = version
        return self._data

    def declare(self, form: ImageForm) -> DataDeclaration:
        """Return what the server is told about the data."""
        data, limits = self.read(form), self._limits
        count = len(data.train) if limits.max_samples is None else limits.max_samples
        if not count:
            raise ReportableProblem("expected images for training on the device, found none")
        classes = (
            None if limits.hide_classes else tuple(np.unique(data.train.labels.numpy()).tolist())
        )
        return DataDeclaration(count, len(data.test), classes)

    def select(self, form: ImageForm, declaration: DataDeclaration, key: TaskKey) -> FederatedData:
        """Return the data of a round: no more, and of no other classes, than declared."""
        data = self.read(form)
        labels, classes = data.train.labels.numpy(), declaration.classes
        indices = np.arange(len(labels))
        if classes is not None:
            indices = np.flatnonzero(np.isin(labels, classes))
        count = min(declaration.max_samples, self._limits.max_samples or len(labels))
        if len(indices) > count:
            rng = rng_stream(key.seed, "declared", key.round, key.device)
            indices = np.sort(rng.permutation(indices)[:count])
        if not len(indices):
            raise ReportableProblem(
                "expected images of the declared classes on the device, found none"
            )
        nothing = np.zeros(0, np.int64)
        proxy = make_empty_images(form)
        return FederatedData(data.train, data.test, proxy, (indices,), nothing)


def _list_files(path: Path) -> list[tuple[str, int, int]]:
    """Return the names, times and sizes of all files, by which a change is noticed."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    facts = [(str(file), file.stat()) for file in files]
    return [(name, fact.st_mtime_ns, fact.st_size) for name, fact in facts]
