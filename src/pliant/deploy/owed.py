"""What compression has left out of a device's updates: it is owed until it was sent."""

import torch

from pliant.deploy.squeeze import AnySqueeze, Plain, squeezed
from pliant.methods.base import Update
from pliant.methods.merge import touched
from pliant.nn.elastic import Elastic
from pliant.params import Params, params_of


def shortened(net: Elastic, update: Update, how: AnySqueeze, owed: Params) -> tuple[Params, Params]:
    """Return what is sent of an update's change, and what is owed from now on, at full size.

    What was owed is added where this round has trained, and stays owed elsewhere: other rounds
    train other filters, and a merge may throw away what belongs to none that was trained.
    Statistics travel as they are, for they follow those of the server and are no sum of changes.
    """
    if isinstance(how, Plain):
        return update.change, {}
    full = {name: tensor for name, tensor in params_of(net.net).items() if name in net.trained}
    zeros = {name: torch.zeros_like(tensor) for name, tensor in full.items()}
    owed = {
        name: owed[name] if name in owed and owed[name].shape == zero.shape else zero
        for name, zero in zeros.items()
    }
    cover = touched(net, full, update)
    due = {name: torch.where(cover[name] > 0, tensor, 0.0) for name, tensor in owed.items()}
    rest = {name: torch.where(cover[name] > 0, 0.0, tensor) for name, tensor in owed.items()}
    change = {name: tensor for name, tensor in update.change.items() if name in net.trained}
    packed = update.subnet
    sent, left = squeezed(change, how, due if packed is None else net.take(due, packed))
    left = left if packed is None else net.put(zeros, left, packed)
    statistics = {name: tensor for name, tensor in update.change.items() if name not in net.trained}
    return sent | statistics, {name: tensor + left[name] for name, tensor in rest.items()}
