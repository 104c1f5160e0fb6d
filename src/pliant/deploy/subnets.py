"""The sub-networks that a device has trained, drawn again from the rows that it has run."""

from collections.abc import Sequence

from pliant.engine.job import World
from pliant.methods.base import Choosing, Place, Trained
from pliant.nn.subnet import Subnet
from pliant.params import Params


def drawn(world: World, place: Place, rows: Sequence[int], extra: Params) -> Trained:
    """Return the sub-networks of the steps, runs of the same one together.

    `extra` is what the device was sent beside the network: some choose their filters by it.
    """
    method, net = world.method, world.net
    own: dict[tuple[int, ...], Subnet] = {}
    found: list[tuple[Subnet, int]] = []
    for step, row in enumerate(rows):
        subnet = method.subnet(net, row, place, step)
        if isinstance(method, Choosing):
            if subnet.counts not in own:
                own[subnet.counts] = method.chosen(net, subnet, extra, place)
            subnet = own[subnet.counts]
        if found and found[-1][0] is subnet:
            found[-1] = (subnet, found[-1][1] + 1)
        else:
            found.append((subnet, 1))
    return tuple(found)
