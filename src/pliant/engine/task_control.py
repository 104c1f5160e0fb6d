"""The control traffic of a federated task on real devices, by formula.

A request and its reply have headers, and Flower moves them as a few objects with a signed HTTP call
each. What depends on time rather than on rounds is not charged: joining, polling, heartbeats.
"""

import numpy as np

from pliant.devices.vector_rng import FloatArray, IntArray

HEADER_BYTES = 4_700  # of a request, with the experiment, and of its reply
CALLS_BYTES = 19_500  # of Flower's calls, with their headers and signatures
RECORD_BYTES, RECORD_OVERHEAD = 16_384, 22  # TLS


def count_carrier_bytes(size: int) -> int:
    """Return the bytes that carry messages of this size, in both directions."""
    return CALLS_BYTES + RECORD_OVERHEAD * -(-size // RECORD_BYTES)


def count_task_control(tensor_bytes: FloatArray) -> IntArray:
    """Return the control bytes of tasks whose messages have tensors of these sizes; 0 if none.

    >>> import numpy as np
    >>> from pliant.engine.task_control import count_task_control
    >>> count_task_control(np.array([0.0, 1000.0])).tolist()
    [0, 24222]
    """
    records = np.ceil(tensor_bytes / RECORD_BYTES)
    control = HEADER_BYTES + CALLS_BYTES + RECORD_OVERHEAD * records
    return np.where(tensor_bytes > 0, control, 0.0).astype(np.int64)
