"""Energy: joules of compute and of radio, linear in MACs and in bytes."""

from typing import NamedTuple

from pliant.devices.draws import FloatArray


class Traits(NamedTuple):
    """What belongs to the classes of some devices, one number a device.

    >>> import numpy as np
    >>> from pliant.devices import DeviceClass, Fleet
    >>> Fleet(size=3, classes=(DeviceClass(up=1e6),)).traits(np.array([0, 2])).up.tolist()
    [1000000.0, 1000000.0]
    """

    up: FloatArray  # bytes per second; infinity where the link is not modelled
    down: FloatArray
    latency: FloatArray  # seconds
    joules_per_mac: FloatArray
    joules_per_byte: FloatArray


def joules(traits: Traits, macs: FloatArray, sent: FloatArray) -> FloatArray:
    """Return the joules that each device spends on these MACs and these bytes (up and down).

    >>> import numpy as np
    >>> from pliant.devices import DeviceClass, Fleet, joules
    >>> phone = DeviceClass(name="phone", joules_per_mac=2.0, joules_per_byte=0.5)
    >>> traits = Fleet(size=3, classes=(phone,)).traits(np.array([1]))
    >>> joules(traits, macs=np.array([10.0]), sent=np.array([4.0])).tolist()
    [22.0]
    """
    return traits.joules_per_mac * macs + traits.joules_per_byte * sent
