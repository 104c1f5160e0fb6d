"""Error feedback: carry what compression drops from a device's update over to later ones."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from pliant.compression import (
    AnyCompression,
    Uncompressed,
    compress,
    count_encoded_bytes,
    decompress,
)
from pliant.methods.aggregation import cover_trained
from pliant.methods.base import Update
from pliant.methods.validation import TensorSpecs, make_specs
from pliant.nn.elastic import Elastic
from pliant.nn.subnet import Subnet
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


def decompress_delta(
    net: Elastic, encoded: Params, compression: AnyCompression, specs: TensorSpecs
) -> Params:
    """Decode a delta of these specs that `compress_update` has encoded."""
    compressed_specs = {
        name: (torch.Size(spec.shape), spec.dtype)
        for name, spec in specs.items()
        if name in net.trainable_names
    }
    return decompress(encoded, compression, compressed_specs)


def simulate_compression(
    net: Elastic, update: Update, compression: AnyCompression, residual: Params
) -> Update:
    """Return an update as the server decodes it, with the residual that its device keeps."""
    if isinstance(compression, Uncompressed):
        return update
    encoded, residual = compress_update(net, update, compression, residual)
    delta = decompress_delta(net, encoded, compression, make_specs(update.delta))
    return replace(update, delta=delta, residual=residual)


def count_update_bytes(
    net: Elastic, params: Params, compression: AnyCompression, subnet: Subnet | None = None
) -> int:
    """Return the bytes of an encoded delta of full-size params, or of a subnet's part of them."""
    counts: Mapping[str, int] = {} if subnet is None else net.count_entries(subnet)
    plain = Uncompressed()
    return sum(
        count_encoded_bytes(
            counts.get(name, tensor.numel()),
            tensor.dtype,
            compression if name in net.trainable_names else plain,
        )
        for name, tensor in params.items()
    )
