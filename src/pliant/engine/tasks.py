"""Tasks: what the devices that are selected for a round are asked to do."""

from dataclasses import dataclass

import numpy as np

from pliant.devices.draws import FloatArray, IntArray


@dataclass(frozen=True, eq=False)
class Tasks:
    """The mini-batches and the bytes of each device in one round.

    >>> import numpy as np
    >>> from pliant.engine.tasks import tasks
    >>> tasks(np.array([7, 3]), batches=np.array([2, 1]), full=10.0).full.tolist()
    [[10.0, 10.0], [10.0, 0.0]]
    """

    devices: IntArray
    full: FloatArray  # (device, step): MACs with the full network, 0 where a device has fewer steps
    down: FloatArray  # bytes
    up: FloatArray

    def __post_init__(self) -> None:
        runs = (self.full > 0).astype(int)
        if not runs[:, :1].all() or (np.diff(runs, axis=1) > 0).any():
            raise ValueError(
                "Expected at least one mini-batch a device, without gaps, above 0 MACs"
            )


def tasks(
    devices: IntArray,
    batches: IntArray | int,
    full: FloatArray | float,
    *,
    down: FloatArray | float = 0.0,
    up: FloatArray | float = 0.0,
) -> Tasks:
    """Return the tasks of devices whose mini-batches all cost the same.

    >>> import numpy as np
    >>> from pliant.engine.tasks import tasks
    >>> tasks(np.array([7, 3]), batches=4, full=np.array([10.0, 20.0]), up=100.0).up.tolist()
    [100.0, 100.0]
    """
    count = np.broadcast_to(np.asarray(batches), devices.shape)
    runs = np.arange(int(count.max(initial=1))) < count[:, None]
    costs = np.broadcast_to(np.asarray(full, np.float64), devices.shape)
    return Tasks(
        devices,
        np.where(runs, costs[:, None], 0.0),
        np.broadcast_to(np.asarray(down, np.float64), devices.shape),
        np.broadcast_to(np.asarray(up, np.float64), devices.shape),
    )
