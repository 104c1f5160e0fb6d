import numpy as np

from pliant.devices import DeviceClass, Fleet, joules


def test_energy_is_linear_in_macs_and_bytes():
    radio = DeviceClass(joules_per_mac=2.0, joules_per_byte=0.5)
    traits = Fleet(size=4, classes=(radio,)).traits(np.array([0, 3]))
    spent = joules(traits, macs=np.array([10.0, 0.0]), sent=np.array([0.0, 8.0]))
    assert spent.tolist() == [20.0, 4.0]
