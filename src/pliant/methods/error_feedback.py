"""Error feedback: carry what compression drops from a device's update over to later ones."""

import torch

from pliant.compression import AnyCompression, Uncompressed, compress
from pliant.methods.aggregation import cover_trained
from pliant.methods.base import Update
from pliant.nn.elastic import Elastic
from pliant.params import Params, get_params


def compress_update(
    net: Elastic, update: Update, compression: AnyCompression, residual: Params
) -> tuple[Params, Params]:
    """Return the encoded delta to send and the new full-size residual.

    The residual is added only to coordinates trained in this round, as a merge may discard values
    of untrained filters; the rest waits for a later round. Norm statistics are sent uncompressed,
    since they follow the server's and are not a sum of deltas.
    """
    if isinstance(compression, Uncompressed):
        return update.delta, {}
    full = {
        name: tensor
        for name, tensor in get_params(net.module).items()
        if name in net.trainable_names
    }
    zeros = {name: torch.zeros_like(tensor) for name, tensor in full.items()}
    residual = {
        name: residual[name] if name in residual and residual[name].shape == zero.shape else zero
        for name, zero in zeros.items()
    }
    cover = cover_trained(net, full, update)
    due = {name: torch.where(cover[name] > 0, tensor, 0.0) for name, tensor in residual.items()}
    later = {name: torch.where(cover[name] > 0, 0.0, tensor) for name, tensor in residual.items()}
    delta = {name: tensor for name, tensor in update.delta.items() if name in net.trainable_names}
    packed = update.subnet
    encoded, error = compress(delta, compression, due if packed is None else net.take(due, packed))
    error = error if packed is None else net.put(zeros, error, packed)
    statistics = {
        name: tensor for name, tensor in update.delta.items() if name not in net.trainable_names
    }
    return encoded | statistics, {name: tensor + error[name] for name, tensor in later.items()}
