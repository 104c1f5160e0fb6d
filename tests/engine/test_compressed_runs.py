"""Compressed updates in a simulation: what they cost, and that nothing is lost on the way."""

from itertools import islice

import msgspec
import pytest
from tests.engine.raw_records import check_totals
from tests.engine.small_runs import FEDAVG, FLEET, LOCAL, SETTINGS, data, network, run
from tests.methods.wrapped_method import WrappedMethod

from pliant.compression import Float16, Int8, TopK, Uncompressed
from pliant.devices import ConstantTrace, DeviceClass, Fleet
from pliant.engine.ledger import TaskRecord, verify_records
from pliant.engine.round_loop import RunSettings
from pliant.engine.run_store import load_run_state, read_records
from pliant.engine.simulate import simulate
from pliant.methods import FedRolex, Scaffold
from pliant.params import get_params
from pliant.workers.pool import ProcessWorkers

COMPRESSIONS = [Uncompressed(), Float16(), Int8(), TopK(0.25)]
SIZES = [tensor.numel() for tensor in get_params(network()).values()]  # all of them are trained


def compressed(compression, **changes):
    return msgspec.structs.replace(SETTINGS, compression=compression, **changes)


@pytest.mark.parametrize("compression", COMPRESSIONS, ids=lambda c: type(c).__name__)
def test_uploads_are_charged_as_encoded(compression, tmp_path):
    run(settings=compressed(compression), folder=tmp_path)
    assert verify_records(read_records(tmp_path)) == check_totals(tmp_path) == 6
    expected = {
        Uncompressed: 4 * sum(SIZES),
        Float16: 2 * sum(SIZES),
        Int8: sum(size + 4 for size in SIZES),
        TopK: sum(8 * max(1, round(0.25 * size)) for size in SIZES),
    }
    tasks = [record for record in read_records(tmp_path) if isinstance(record, TaskRecord)]
    merged = [task for task in tasks if task.steps]
    assert {task.up for task in merged} == {expected[type(compression)]}
    assert {task.down for task in merged} == {4 * sum(SIZES)}


def test_a_smaller_upload_arrives_in_time():
    # half of the round is for computing, and a plain upload takes more than the other half
    link = DeviceClass(up=4 * sum(SIZES) / 0.6)
    fleet = Fleet(size=12, speed=ConstantTrace(2.0), classes=(link,))
    settings = RunSettings(rounds=1, per_round=4)
    outcomes = [
        run(fleet=fleet, settings=msgspec.structs.replace(settings, compression=compression))
        for compression in COMPRESSIONS
    ]
    assert [records[0].merged for records in outcomes] == [0, 4, 4, 4]


@pytest.mark.parametrize("method", [FEDAVG, Scaffold(LOCAL), FedRolex(local=LOCAL)])
def test_an_interrupted_run_keeps_what_compression_dropped(method, tmp_path):
    settings = compressed(TopK(0.1))
    uninterrupted = run(method, settings=settings, folder=tmp_path / "uninterrupted")
    interrupted = simulate(
        method, network(), data(), FLEET, settings=settings, folder=tmp_path / "resumed"
    )
    assert len(list(islice(interrupted, 5))) == 5  # saved after the fourth
    interrupted.close()
    resumed = run(method, settings=settings, folder=tmp_path / "resumed")
    assert resumed == uninterrupted[4:]
    files = [
        (tmp_path / name / "events.jsonl").read_bytes() for name in ("uninterrupted", "resumed")
    ]
    assert files[0] == files[1]


def test_a_worker_process_compresses_as_the_inline_worker_does():
    settings = compressed(TopK(0.1))
    records = run(settings=settings)
    assert records[-1].digest != run()[-1].digest
    assert run(settings=settings, workers=ProcessWorkers(1)) == records


def test_only_merged_devices_keep_a_residual(tmp_path):
    run(settings=compressed(Int8()), folder=tmp_path)
    tasks = [record for record in read_records(tmp_path) if isinstance(record, TaskRecord)]
    residuals = load_run_state(tmp_path).residuals
    assert residuals.keys() == {task.device for task in tasks if task.steps}
    run(folder=tmp_path / "plain")
    assert load_run_state(tmp_path / "plain").residuals == {}


class Forgetful(WrappedMethod):
    """A method that leaves out one tensor of its delta."""

    def train(self, net, task, steps):
        update = super().train(net, task, steps)
        update.delta.popitem()
        return update


def test_a_malformed_delta_is_rejected_and_not_compressed():
    records = run(Forgetful(FEDAVG), settings=compressed(Int8(), rounds=1))
    assert records[0].merged == 0
    assert "rejected" in records[0].outcomes
