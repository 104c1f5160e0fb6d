"""The ledger has the bytes that go over the network, in a simulation by formula."""

import pytest
from tests.deploy.faulty_proxy import FaultyProxy
from tests.deploy.federation_keys import make_federation_keys
from tests.deploy.grpc_in_process import make_experiment, run_with_devices, simulate_rounds

from pliant.engine.ledger import RoundRecord, verify_records

EARLY, LATE = "features.2", "classifier.2"


@pytest.mark.parametrize(
    ("method", "cut"),
    [("adasplit", EARLY), ("adasplit", LATE), ("splitfed", EARLY), ("split", LATE)],
)
def test_the_ledger_has_the_bytes_on_the_wire(tmp_path, method, cut):
    proxies = []

    def through(port):
        proxies.append(FaultyProxy(port))
        return proxies[0].port

    fields = {"local": {"batch": 32}, "cut": cut}
    source = f"{tmp_path}/tiny.py:few_tests"
    options = {"network": {"name": "digits_cnn"}, "data": {"name": source, "proxy": 7700}}
    if method == "splitfed":  # half of the features, up and down
        fields["payload"] = {"columns": 0.5, "dtype": "int8"}
    if (method, cut) == ("adasplit", LATE):  # so little is sent that a reconnection would matter
        fields["kappa"], options["data"]["proxy"], options["rounds"] = 0.0, 7400, 4
    experiment = make_experiment(tmp_path, method, fields=fields, **options)
    make_federation_keys(tmp_path / "keys", devices=3)
    records = run_with_devices(
        experiment, tmp_path, tmp_path / "keys", through=through, pace="measured"
    )
    verify_records(records)
    rounds = [record for record in records if isinstance(record, RoundRecord)]
    proxies[0].close()
    wire = proxies[0].forwarded_bytes
    assert sum(record.sent for record in rounds) == pytest.approx(wire, rel=0.02)
    simulated = simulate_rounds(experiment)
    assert sum(record.sent for record in simulated) == pytest.approx(wire, rel=0.02)
    for record, other in zip(rounds, simulated, strict=True):
        assert (record.up, record.down) == (other.up, other.down)
    assert rounds[-1].digest == simulated[-1].digest
