"""The ledger has the bytes that go over the network."""

import pytest
from tests.deploy.faulty_proxy import FaultyProxy
from tests.deploy.grpc_in_process import make_experiment, run_with_devices

from pliant.engine.ledger import TaskRecord, verify_records


@pytest.mark.parametrize("method", ["adasplit", "splitfed", "split"])
def test_the_ledger_has_the_bytes_on_the_wire(tmp_path, method):
    proxies = []

    def through(port):
        proxies.append(FaultyProxy(port))
        return proxies[0].port

    experiment = make_experiment(
        tmp_path,
        method,
        fields={"local": {"batch": 32}, "cut": "features.2"},
        network={"name": "digits_cnn"},
        data={"proxy": 7700},
    )
    records = run_with_devices(experiment, tmp_path, through=through, pace="measured")
    verify_records(records)
    tasks = [record for record in records if isinstance(record, TaskRecord)]
    charged = sum(task.down + task.up for task in tasks)
    proxies[0].close()
    assert charged == pytest.approx(proxies[0].forwarded_bytes, rel=0.02)
