"""Updates that wait on the disk until their round closes are merged like those in memory."""

from functools import partial

import pytest
from tests.deploy.in_process import (
    InProcessTransport,
    compute_simulated_digest,
    make_devices,
    make_experiment,
    serve_rounds,
)

from pliant.deploy.server import serve
from pliant.deploy.server.reply_store import ReplyStore

CLIPPED = {"guard": {"norm": 0.01, "clip": True}}


@pytest.mark.parametrize(("method", "fields"), [("scaffold", {}), ("fedavg", CLIPPED)])
def test_a_round_has_one_result_wherever_its_updates_wait(method, fields, tmp_path, monkeypatch):
    stores = []

    class CountingStore(ReplyStore):
        def keep(self, message, reply):
            kept = super().keep(message, reply)
            assert not kept.update.delta
            stores.append(len(self._files))
            return kept

    monkeypatch.setattr(serve, "ReplyStore", partial(CountingStore, max_bytes=0))
    experiment = make_experiment(method, **fields)
    transport = InProcessTransport(make_devices(experiment, tmp_path))
    records = serve_rounds(experiment, transport, tmp_path / "run", pace="simulated")
    assert stores == [1, 2, 3] * 2
    assert records[-1].digest == compute_simulated_digest(experiment)
