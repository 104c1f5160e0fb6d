"""The file of a table: safetensors, with the network's fingerprint and where it came from."""

import zlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from pliant import atomic
from pliant.explore.table import Table

FORMAT = "pliant table 1"


def save_table(path: Path, table: Table, provenance: Any = None) -> Path:
    """Write a table and a plain value that tells where it came from.

    >>> import tempfile
    >>> from pathlib import Path
    >>> import torch
    >>> import pliant as pl
    >>> net = pl.elastic(pl.models.digits_cnn(), torch.zeros(1, 1, 28, 28))
    >>> with tempfile.TemporaryDirectory() as place:
    ...     pl.save_table(Path(place, "table.safetensors"), pl.uniform_table(net, rows=3)).name
    'table.safetensors'
    """
    tensors: dict[str, NDArray[Any]] = {
        "rates": _narrowest(table.rates),
        "macs": np.asarray(table.shares, np.float64) * (table.full_macs or 1.0),
        "shares": np.asarray(table.shares, np.float64),
        # names repeat themselves: packed, those of DenseNet-100 take 1 kB
        "layers": np.frombuffer(zlib.compress("\n".join(table.layers).encode(), 9), np.uint8),
    }
    if table.gains:
        tensors["gains"] = np.asarray(table.gains, np.float64)
    if table.seconds:
        tensors["seconds"] = np.asarray(table.seconds, np.float64)
    told = {
        "format": FORMAT,
        "network": table.network,
        "full_macs": table.full_macs,
        "provenance": provenance,
    }
    # one entry, because safetensors writes several in any order: equal tables make equal files
    metadata = {"table": msgspec.json.encode(told).decode()}
    atomic.write_bytes(path, safetensors.numpy.save(tensors, metadata))
    return path


def _narrowest(rates: tuple[tuple[float, ...], ...]) -> NDArray[Any]:
    """Return rates in half the bytes where that loses nothing: what a search finds is rounded."""
    whole = np.asarray(rates, np.float64)
    half = whole.astype(np.float32)
    return half if np.array_equal(half.astype(np.float64), whole) else whole


def load_table(path: Path) -> Table:
    """Read a table, or say what is wrong with the file.

    >>> import tempfile
    >>> from pathlib import Path
    >>> import torch
    >>> import pliant as pl
    >>> net = pl.elastic(pl.models.digits_cnn(), torch.zeros(1, 1, 28, 28))
    >>> with tempfile.TemporaryDirectory() as place:
    ...     path = pl.save_table(Path(place, "table.safetensors"), pl.uniform_table(net, rows=3))
    ...     pl.load_table(path).rates
    ((0.5, 0.5), (0.25, 0.25), (0.0, 0.0))
    """
    return _read(path)[0]


def provenance_of(path: Path) -> Any:
    """Read where a table came from."""
    return _read(path)[1]


def _read(path: Path) -> tuple[Table, Any]:
    raw = path.read_bytes()
    try:
        tensors = safetensors.numpy.load(raw)
        size = int.from_bytes(raw[:8], "little")
        told = msgspec.json.decode(raw[8 : 8 + size])["__metadata__"]["table"]
        metadata = msgspec.json.decode(told)
        if metadata["format"] != FORMAT:
            raise ValueError(f"expected {FORMAT!r}, got {metadata['format']!r}")
        layers = zlib.decompress(tensors["layers"].tobytes()).decode()
        table = Table(
            metadata["network"],
            tuple(tuple(row) for row in tensors["rates"].astype(np.float64).tolist()),
            tuple(tensors["shares"].tolist()),
            tuple(tensors["gains"].tolist()) if "gains" in tensors else (),
            tuple(tensors["seconds"].tolist()) if "seconds" in tensors else (),
            tuple(layers.split("\n")) if layers else (),
            float(metadata["full_macs"]),
        )
        return table, metadata["provenance"]
    except KeyError as error:
        raise ValueError(f"{path}: expected a table of pliant, found no {error}") from None
    except (ValueError, zlib.error, safetensors.SafetensorError, msgspec.DecodeError) as error:
        raise ValueError(f"{path}: {error}") from None
