"""Table files: safetensors with the network's fingerprint and the table's provenance."""

import zlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from pliant.nn.pareto_table import ParetoTable
from pliant.storage import atomic, formats

FLOAT_COLUMNS = ("gains", "seconds", "batch_shares", "stages")


def save_table(path: str | Path, table: ParetoTable, provenance: Any = None) -> Path:
    """Write a table together with its provenance, a plain value.

    >>> import tempfile
    >>> from pathlib import Path
    >>> import torch
    >>> import pliant as pl
    >>> net = pl.elastic(pl.models.digits_cnn(), torch.zeros(1, 1, 28, 28))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     pl.save_table(Path(folder, "table.safetensors"), pl.uniform_table(net, rows=3)).name
    'table.safetensors'
    """
    tensors: dict[str, NDArray[Any]] = {
        "rates": _to_smallest_dtype(table.rates),
        "macs": np.asarray(table.shares, np.float64) * (table.full_macs or 1.0),
        "shares": np.asarray(table.shares, np.float64),
        # Layer names are repetitive: compressed, those of DenseNet-100 take 1 kB.
        "layers": np.frombuffer(zlib.compress("\n".join(table.layers).encode(), 9), np.uint8),
    }
    for name in FLOAT_COLUMNS:
        if column := getattr(table, name):
            tensors[name] = np.asarray(column, np.float64)
    if table.sides:
        tensors["sides"] = np.array([side or 0 for side in table.sides], np.int32)
    header = {
        "format": formats.TABLE.number,
        "network": table.network,
        "full_macs": table.full_macs,
        "provenance": provenance,
    }
    # A single entry, because safetensors does not fix the order: equal tables make equal files.
    metadata = {"table": msgspec.json.encode(header).decode()}
    atomic.write_bytes(Path(path), safetensors.numpy.save(tensors, metadata))
    return Path(path)


def _to_smallest_dtype(rates: tuple[tuple[float, ...], ...]) -> NDArray[Any]:
    """Return rates as float32 if that loses nothing, since searches round them."""
    double = np.asarray(rates, np.float64)
    single = double.astype(np.float32)
    return single if np.array_equal(single.astype(np.float64), double) else double


def load_table(path: str | Path) -> ParetoTable:
    """Read a table file.

    >>> import tempfile
    >>> from pathlib import Path
    >>> import torch
    >>> import pliant as pl
    >>> net = pl.elastic(pl.models.digits_cnn(), torch.zeros(1, 1, 28, 28))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pl.save_table(Path(folder, "table.safetensors"), pl.uniform_table(net, rows=3))
    ...     pl.load_table(path).rates
    ((0.5, 0.5), (0.25, 0.25), (0.0, 0.0))
    """
    return _read_table(Path(path))[0]


def read_provenance(path: Path) -> Any:
    return _read_table(path)[1]


def _read_table(path: Path) -> tuple[ParetoTable, Any]:
    raw = path.read_bytes()
    try:
        tensors = safetensors.numpy.load(raw)
        size = int.from_bytes(raw[:8], "little")
        metadata = msgspec.json.decode(raw[8 : 8 + size])["__metadata__"]["table"]
        header = msgspec.json.decode(metadata)
        number = header["format"]
        formats.TABLE.check(None if number == "pliant table 1" else number, path)
        layers = zlib.decompress(tensors["layers"].tobytes()).decode()
        optional = {
            name: tuple(tensors[name].tolist()) for name in FLOAT_COLUMNS if name in tensors
        }
        table = ParetoTable(
            header["network"],
            tuple(tuple(row) for row in tensors["rates"].astype(np.float64).tolist()),
            tuple(tensors["shares"].tolist()),
            layers=tuple(layers.split("\n")) if layers else (),
            full_macs=float(header["full_macs"]),
            # 0 in a file: as they are
            sides=tuple(side or None for side in tensors.get("sides", np.zeros(0)).tolist()),
            **optional,
        )
        return table, header["provenance"]
    except formats.UnsupportedFormat:
        raise
    except KeyError as error:
        raise ValueError(f"{path}: expected a pliant table, found no {error}") from None
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path}: expected a table of `pliant search`: {error}") from None
    except (ValueError, zlib.error, msgspec.DecodeError) as error:
        raise ValueError(f"{path}: {error}") from None
