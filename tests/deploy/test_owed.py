"""Nothing that compression leaves out is lost, whichever filters a round trains."""

import numpy as np
import pytest
import torch
from near import Near, described, devices_of, served

import pliant as pl
from pliant.deploy.owed import shortened
from pliant.deploy.squeeze import Bytes, Half, Largest, Plain, restored
from pliant.engine.ledger import RoundRecord, check
from pliant.methods.base import Update
from pliant.params import params_of

NET = pl.elastic(pl.models.digits_cnn_bn(), torch.zeros(1, 1, 28, 28))


def filters(step, is_packed):
    if is_packed:
        return NET.first(0.5, NET.rolled(step))
    return NET.draw(0.5, np.random.default_rng(step))


def changed(subnet, is_packed, seed):
    """Return an update that changes what a sub-network has, whole or packed."""
    draw = torch.Generator().manual_seed(seed)
    full = params_of(NET.net)
    small = {
        name: torch.randn(tensor.shape, generator=draw) if tensor.is_floating_point() else tensor
        for name, tensor in NET.take(full, subnet).items()
    }
    zeros = {name: torch.zeros_like(tensor) for name, tensor in full.items()}
    change = small if is_packed else NET.put(zeros, small, subnet)
    packed = subnet if is_packed else None
    return Update(0, change, 1, 1, 1.0, 0.0, packed, trained=((subnet, 1),))


def whole(change, subnet):
    zeros = {name: torch.zeros_like(tensor) for name, tensor in params_of(NET.net).items()}
    return change if subnet is None else NET.put(zeros, change, subnet)


@pytest.mark.parametrize("how", [Half(), Bytes(), Largest(0.1)])
@pytest.mark.parametrize("is_packed", [True, False])
def test_what_was_sent_and_what_is_owed_make_the_sum_of_all_changes(how, is_packed):
    owed, got, wanted = {}, {}, {}
    for step in range(6):
        subnet = filters(step, is_packed)
        update = changed(subnet, is_packed, step)
        sent, owed = shortened(NET, update, how, owed)
        like = {n: (t.shape, t.dtype) for n, t in update.change.items() if n in NET.trained}
        arrived = whole(restored(sent, how, like), update.subnet)
        inside = NET.embed(params_of(NET.net), NET.take(params_of(NET.net), subnet), subnet)[1]
        for name, tensor in whole(update.change, update.subnet).items():
            assert not arrived[name][inside[name] == 0].any()  # nothing where nothing was trained
            got[name] = got.get(name, 0) + arrived[name]
            wanted[name] = wanted.get(name, 0) + tensor
    assert owed.keys() == NET.trained
    for name in wanted:
        torch.testing.assert_close(got[name] + owed.get(name, 0), wanted[name], rtol=0, atol=2e-5)


def test_statistics_travel_as_they_are_and_plain_updates_are_the_same_objects():
    update = changed(NET.full, False, 0)
    sent, owed = shortened(NET, update, Largest(0.1), {})
    assert sent["features.1.running_var"] is update.change["features.1.running_var"]
    assert not any("running" in name for name in owed)
    assert shortened(NET, update, Plain(), {"x": torch.ones(1)}) == (update.change, {})


@pytest.mark.parametrize("method", ["fedavg", "distreal", "fedrolex"])
def test_no_update_of_a_network_with_statistics_is_refused(method, tmp_path):
    network, data = {"name": "digits_cnn_bn"}, {"proxy": 7700}
    experiment = described(method, rounds=4, network=network, data=data)
    link = Near(devices_of(experiment, tmp_path))
    records = served(experiment, link, tmp_path / "run", squeeze={"type": "topk"})
    assert check(records) == 4
    assert records[-1].ends == {"finished": 3}
    assert sum(record.merged for record in records if isinstance(record, RoundRecord)) == 12
