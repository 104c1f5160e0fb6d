"""Nothing that compression drops is lost, whichever filters a round trains."""

import numpy as np
import pytest
import torch
from tests.deploy.in_process import InProcessTransport, make_devices, make_experiment, serve_rounds

import pliant as pl
from pliant.compression import Float16, Int8, TopK, Uncompressed, decompress
from pliant.engine.ledger import RoundRecord, verify_records
from pliant.methods.base import Update
from pliant.methods.error_feedback import compress_update, count_update_bytes
from pliant.params import get_params, nbytes

NET = pl.elastic(pl.models.digits_cnn_bn(), torch.zeros(1, 1, 28, 28))
PARAMS = get_params(NET.module)
ZEROS = {name: torch.zeros_like(tensor) for name, tensor in PARAMS.items()}


def make_subnet(step, is_packed):
    if is_packed:
        return NET.select_prefix(0.5, NET.make_rolling_orders(step))
    return NET.draw(0.5, np.random.default_rng(step))


def make_update(subnet, is_packed, seed):
    """Make a packed or full-size update with random changes to a subnet."""
    rng = torch.Generator().manual_seed(seed)
    delta = {
        name: torch.randn(tensor.shape, generator=rng) if tensor.is_floating_point() else tensor
        for name, tensor in NET.take(PARAMS, subnet).items()
    }
    packed = subnet if is_packed else None
    delta = delta if is_packed else NET.put(ZEROS, delta, subnet)
    return Update(0, delta, 1, 1, 1.0, 0.0, packed, subnet_steps=((subnet, 1),))


def unpack(delta, subnet):
    return delta if subnet is None else NET.put(ZEROS, delta, subnet)


@pytest.mark.parametrize("compression", [Float16(), Int8(), TopK(0.1)])
@pytest.mark.parametrize("is_packed", [True, False])
def test_the_sent_deltas_and_the_residual_add_up_to_all_deltas(compression, is_packed):
    residual, received_sum, delta_sum = {}, {}, {}
    for step in range(6):
        subnet = make_subnet(step, is_packed)
        update = make_update(subnet, is_packed, step)
        encoded, residual = compress_update(NET, update, compression, residual)
        assert count_update_bytes(NET, PARAMS, compression, update.subnet) == nbytes(encoded)
        specs = {n: (t.shape, t.dtype) for n, t in update.delta.items() if n in NET.trainable_names}
        received = unpack(decompress(encoded, compression, specs), update.subnet)
        cover = NET.embed(PARAMS, NET.take(PARAMS, subnet), subnet)[1]
        for name, tensor in unpack(update.delta, update.subnet).items():
            assert not received[name][cover[name] == 0].any()  # only trained coordinates are sent
            received_sum[name] = received_sum.get(name, 0) + received[name]
            delta_sum[name] = delta_sum.get(name, 0) + tensor
    assert residual.keys() == NET.trainable_names
    for name, expected in delta_sum.items():
        total = received_sum[name] + residual.get(name, 0)
        torch.testing.assert_close(total, expected, rtol=0, atol=2e-5)


def test_statistics_and_uncompressed_updates_are_sent_as_they_are():
    update = make_update(NET.full, False, 0)
    encoded, residual = compress_update(NET, update, TopK(0.1), {})
    assert encoded["features.1.running_var"] is update.delta["features.1.running_var"]
    assert not any("running" in name for name in residual)
    assert compress_update(NET, update, Uncompressed(), {"x": torch.ones(1)}) == (update.delta, {})


@pytest.mark.parametrize("method", ["fedavg", "distreal", "fedrolex"])
def test_no_compressed_update_of_a_network_with_norm_statistics_is_rejected(method, tmp_path):
    network, data = {"name": "digits_cnn_bn"}, {"proxy": 7700}
    compression = {"type": "topk"}
    experiment = make_experiment(
        method, rounds=4, network=network, data=data, compression=compression
    )
    transport = InProcessTransport(make_devices(experiment, tmp_path))
    records = serve_rounds(experiment, transport, tmp_path / "run")
    assert verify_records(records) == 4
    assert records[-1].outcomes == {"finished": 3}
    assert sum(record.merged for record in records if isinstance(record, RoundRecord)) == 12
