"""The keys of a server and of devices that it has approved, all on this machine."""

from pliant.deploy.security.certificates import (
    make_device_key,
    make_keys,
    write_device_folder,
)
from pliant.deploy.security.enrolment import enrol_local_device


def make_federation_keys(keys, *, devices, hosts=()):
    """Make a server's keys and those of its devices, below it in `devices/NUMBER`."""
    make_keys(keys, hosts=hosts)
    for number in range(devices):
        enrol_local_device(keys, number, keys / "devices" / str(number))


def make_stranger_key(keys, folder, number=0):
    """Make a key that the server does not know, in the folder of a device that trusts it."""
    write_device_folder(folder, (keys / "ca.crt").read_bytes(), make_device_key()[0], number)
    return folder / "key"
