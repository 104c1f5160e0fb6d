"""The tasks of a round: mini-batches, bytes, and the rows that fit in memory."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pliant.data import count_batches
from pliant.devices.budget import BoolArray
from pliant.devices.vector_rng import FloatArray, IntArray
from pliant.methods.base import LocalTraining


@dataclass(frozen=True, eq=False)
class RoundTasks:
    """The mini-batches and the bytes of each device in one round.

    >>> import numpy as np
    >>> from pliant.engine.round_tasks import make_tasks
    >>> make_tasks(np.array([7, 3]), np.array([2, 1]), 10.0).full_macs.tolist()
    [[10.0, 10.0], [10.0, 0.0]]
    """

    devices: IntArray
    full_macs: FloatArray  # (device, step): with the full network, 0 past a device's last step
    down_bytes: FloatArray
    up_bytes: FloatArray
    fits: BoolArray | None = None  # (device, row or 1): rows that fit in memory; None: all do
    open_passes: int = 0  # over the data; above 0, devices do as many steps of them as fit
    # (row,): how many times longer its steps take than their MACs do at the device's speed
    slowness: FloatArray | None = None

    def find_fitting(self) -> IntArray | None:
        """Return which devices can train at all; None if all can."""
        is_fitting = None if self.fits is None else self.fits.any(axis=1)
        return None if is_fitting is None or is_fitting.all() else np.flatnonzero(is_fitting)

    def select(self, index: IntArray) -> "RoundTasks":
        """Return the tasks of some devices."""
        return RoundTasks(
            self.devices[index],
            self.full_macs[index],
            self.down_bytes[index],
            self.up_bytes[index],
            None if self.fits is None else self.fits[index],
            self.open_passes,
            self.slowness,
        )

    def compute_work(self, rows: IntArray, macs: FloatArray) -> FloatArray:
        """Return the MACs of the full network that take as long as these steps."""
        return macs if self.slowness is None else macs * self.slowness[rows]

    @cached_property
    def full_macs_left(self) -> FloatArray:
        """Return the full network's MACs of each step and all later ones."""
        return np.cumsum(self.full_macs[:, ::-1], axis=1)[:, ::-1]

    def __post_init__(self) -> None:
        has_step = self.full_macs > 0
        if has_step.all():
            return
        if not has_step[:, :1].all() or (has_step[:, 1:] > has_step[:, :-1]).any():
            raise ValueError(
                "Expected at least one mini-batch per device, without gaps, each above 0 MACs"
            )


def make_tasks(
    devices: IntArray,
    num_batches: IntArray | int,
    full_macs: FloatArray | float,
    *,
    down_bytes: FloatArray | float = 0.0,
    up_bytes: FloatArray | float = 0.0,
) -> RoundTasks:
    """Return the tasks of devices whose mini-batches all cost the same.

    >>> import numpy as np
    >>> from pliant.engine.round_tasks import make_tasks
    >>> make_tasks(np.array([7, 3]), 4, np.array([10.0, 20.0]), up_bytes=100.0).up_bytes.tolist()
    [100.0, 100.0]
    """
    count = np.broadcast_to(np.asarray(num_batches), devices.shape)
    has_step = np.arange(int(count.max(initial=1))) < count[:, None]
    costs = np.broadcast_to(np.asarray(full_macs, np.float64), devices.shape)
    return RoundTasks(
        devices,
        np.where(has_step, costs[:, None], 0.0),
        np.broadcast_to(np.asarray(down_bytes, np.float64), devices.shape),
        np.broadcast_to(np.asarray(up_bytes, np.float64), devices.shape),
    )


@dataclass(frozen=True, eq=False)
class LocalWork:
    """The mini-batch sizes of one task, and the MACs per sample of the full network."""

    sizes: tuple[int, ...]
    full_macs: float

    def macs_left(self, step: int) -> float:
        """Return the full network's MACs of a step and all later ones."""
        return self.full_macs * sum(self.sizes[step:])


def list_batch_sizes(samples: int, local: LocalTraining) -> tuple[int, ...]:
    """Return the sizes of the mini-batches in one epoch over these samples."""
    count = count_batches(samples, local.batch, drop_short=local.drop_short)
    return tuple(min(local.batch, samples - index * local.batch) for index in range(count))
