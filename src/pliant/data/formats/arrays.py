"""Labelled arrays in NPZ, CSV and Parquet files.

An NPZ file has the arrays `images` and `labels`. A table has a column `label`; its other columns
are the values of an image in order, or one column of lists. Whole numbers are pixels from 0 to 255.
"""

import csv
import zipfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pliant.extras import require

ARRAY_SUFFIXES = (".npz", ".csv", ".parquet")
LABEL = "label"

Arrays = tuple[NDArray[np.generic], NDArray[np.generic]]  # images and labels


def read_arrays(path: Path) -> Arrays:
    """Read the images, as one array of any shape, and the labels of a file."""
    read = {".npz": _read_npz, ".csv": _read_csv, ".parquet": _read_parquet}[path.suffix]
    images, labels = read(path)
    if labels.ndim != 1 or len(labels) != len(images):
        raise ValueError(f"{path}: expected {len(images)} labels, got shape {labels.shape}")
    if labels.dtype.kind not in "iu":
        raise ValueError(f"{path}: expected whole numbers as labels, got {labels.dtype}")
    if images.dtype.kind in "iu":
        if images.size and not 0 <= images.min() <= images.max() <= 255:
            raise ValueError(f"{path}: expected whole numbers from 0 to 255, got others")
        images = images.astype(np.uint8)
    elif images.dtype.kind == "f":
        images = images.astype(np.float32)
        if not np.isfinite(images).all():
            raise ValueError(f"{path}: expected finite numbers, got others")
    else:
        raise ValueError(f"{path}: expected numbers, got {images.dtype}")
    return images, labels.astype(np.int64)


def _read_npz(path: Path) -> Arrays:
    try:
        with np.load(path, allow_pickle=False) as file:
            return file["images"], file["labels"]
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path}: expected the arrays images and labels: {error}") from None


def _read_csv(path: Path) -> Arrays:
    with open(path, newline="", encoding="utf-8") as file:
        header, *rows = list(csv.reader(file)) or [[]]
    if header.count(LABEL) != 1 or len(header) < 2:
        raise ValueError(f"{path}: expected a header with {LABEL!r} and others, got {header[:5]}")
    column = header.index(LABEL)
    for number, row in enumerate(rows, start=2):
        if len(row) != len(header):
            raise ValueError(
                f"{path}, line {number}: expected {len(header)} values, got {len(row)}"
            )
    labels = [row.pop(column) for row in rows]
    try:
        values: NDArray[np.generic] = np.array(rows, np.float64).reshape(len(rows), -1)
        if not any(mark in text for row in rows for text in row for mark in ".en"):
            values = values.astype(np.int64)
        return values, np.array([int(label) for label in labels], np.int64)
    except ValueError as error:
        raise ValueError(f"{path}: expected numbers only: {error}") from None


def _read_parquet(path: Path) -> Arrays:
    duckdb = require("duckdb", "report")
    try:
        with duckdb.connect() as connection:
            columns = connection.execute("FROM read_parquet(?)", [str(path)]).fetchnumpy()
    except duckdb.Error as error:
        raise ValueError(f"{path}: expected a Parquet file: {str(error).splitlines()[0]}") from None
    if any(np.ma.is_masked(column) for column in columns.values()):
        raise ValueError(f"{path}: expected no missing values, found some")
    labels = np.asarray(columns.pop(LABEL, np.empty(0, object)))
    if not columns or labels.dtype == object:
        raise ValueError(f"{path}: expected a column {LABEL!r} of whole numbers and others")
    parts = [np.ma.getdata(column) for column in columns.values()]
    if len(parts) == 1 and parts[0].dtype == object:
        try:
            return np.stack([np.asarray(item) for item in parts[0]]), labels
        except ValueError:
            raise ValueError(f"{path}: expected lists of one length, got several") from None
    return np.stack(parts, axis=1), labels
