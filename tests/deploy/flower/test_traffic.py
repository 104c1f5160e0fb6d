"""Real processes: the ledger has the bytes that Flower sends, in a simulation by formula.

All of these are slow, as `supervise/test_own_data.py` also counts them, in one round.
"""

import pytest
from tests.deploy.faulty_proxy import FaultyProxy
from tests.deploy.in_process import make_experiment, make_own_experiment, write_own_data
from tests.deploy.supervise.test_federation import find_free_port
from tests.waiting import LIMIT

from pliant.deploy.device.host import Limits
from pliant.deploy.security.certificates import find_device_files, make_keys
from pliant.deploy.settings import ServerSettings
from pliant.deploy.supervise.child_process import run_supervisor
from pliant.deploy.supervise.federation import Federation
from pliant.deploy.supervise.node import DeviceSupervisor
from pliant.engine.simulate import simulate
from pliant.experiment.build import build_experiment

pytestmark = [pytest.mark.waits, pytest.mark.slow]

FLEET = {"size": 1, "round_seconds": LIMIT}
# so large that joining and polling, which are not charged, do not matter
NETWORK = {"name": "femnist_cnn", "options": {"hidden": 1024}}


def run_behind_proxy(experiment, folder, limits=None):
    """Run an experiment with one device behind a proxy; return the rounds and the proxy's count."""
    make_keys(folder / "keys")
    port, settings = find_free_port(), ServerSettings(allowance=LIMIT, patience=LIMIT)
    federation = Federation(
        experiment, folder / "run", settings=settings, port=port, keys=folder / "keys"
    )
    federation.devices[0].close()
    proxy, state = FaultyProxy(port), folder / "run" / "devices" / "0"
    ca, key, _ = find_device_files(state / "keys")
    federation.devices[0] = DeviceSupervisor(
        "federated", 0, f"127.0.0.1:{proxy.port}", state, limits or Limits(), ca=ca, key=key
    )
    with run_supervisor(federation):
        records = list(federation.watch())
    proxy.close()
    return records, proxy.forwarded_bytes


@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_the_ledger_has_the_bytes_on_the_wire(tmp_path, method):
    experiment = make_experiment(
        method, fleet=FLEET, network=NETWORK, data={"proxy": 7900}, per_round=1
    )
    records, wire = run_behind_proxy(experiment, tmp_path)
    net, data = build_experiment(experiment)
    options = {"settings": experiment.settings}
    simulated = list(simulate(experiment.method, net, data, experiment.fleet, **options))
    assert [record.outcomes for record in records] == [{"finished": 1}] * 2
    for rounds in (records, simulated):
        assert sum(record.sent for record in rounds) == pytest.approx(wire, rel=0.02)
    assert records[-1].digest == simulated[-1].digest


def test_the_ledger_has_the_bytes_of_tests_on_devices(tmp_path):
    options = {"per_round": 1, "data": {"proxy": 7900}}
    options["evaluation"] = {"every": 1, "statistics": {"type": "running"}}
    experiment = make_own_experiment(fleet=FLEET, network=NETWORK, **options)
    write_own_data(experiment, tmp_path / "own")
    limits = Limits(data=str(tmp_path / "own" / "0"))
    records, wire = run_behind_proxy(experiment, tmp_path, limits)
    assert all(record.on_devices.tests == (20,) for record in records)
    assert sum(record.sent for record in records) == pytest.approx(wire, rel=0.02)
