"""Local training in workers against the same training in one process."""

import os

import pytest
from tests.split.small_split import LOCAL, make_data, run

from pliant.devices import ChangingTrace, DeviceClass, Fleet
from pliant.split import AdaSplit, AuxSplit, OneShotSplit, deferred
from pliant.split.client import LocalClient
from pliant.workers.pool import ProcessWorkers

pytestmark = pytest.mark.waits

ADASPLIT = AdaSplit(local=LOCAL, kappa=0.5)
FLEET = Fleet(size=3, speed=ChangingTrace(low=0.3), classes=(DeviceClass(up=1e6),))
METHODS = {
    "adasplit": ADASPLIT,
    "elastic": AdaSplit(local=LOCAL, kappa=0.5, elastic=True),
    "untrained": AdaSplit(local=LOCAL, kappa=0.5, objective="none"),
    "auxiliary": AuxSplit(local=LOCAL, every=5),
    "aligned": AuxSplit(local=LOCAL, align=1, align_steps=2, federate=False),
    "one-shot": OneShotSplit(local=LOCAL, local_share=0.5, elastic=True),
}


@pytest.fixture(autouse=True)
def short_jobs(monkeypatch):
    """Give every client several jobs."""
    monkeypatch.setattr(deferred, "JOB_BATCHES", 2)


def train(method, folder, **options):
    last = run(method, data=make_data((40, 17, 8)), fleet=FLEET, folder=folder, **options)[-1]
    return last.digest, (folder / "events.jsonl").read_bytes()


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_any_number_of_workers_gives_the_files_of_one_process(method, tmp_path):
    inline = train(method, tmp_path / "inline")
    for count in (1, 2) if method is ADASPLIT else (2,):
        assert train(method, tmp_path / str(count), workers=ProcessWorkers(count)) == inline


def test_clients_train_in_workers_while_they_need_no_server(monkeypatch, tmp_path):
    parent, train_here = os.getpid(), LocalClient.backward

    def backward(client, gradient):
        assert os.getpid() != parent
        train_here(client, gradient)

    method = AdaSplit(local=LOCAL, kappa=1.0)
    inline = train(method, tmp_path / "inline")
    monkeypatch.setattr(LocalClient, "backward", backward)
    assert train(method, tmp_path / "two", workers=ProcessWorkers(2)) == inline


@pytest.mark.parametrize("stop", [1, 3])
def test_a_run_with_workers_resumes_with_another_number_of_them(stop, tmp_path):
    inline = train(ADASPLIT, tmp_path / "inline")
    folder = tmp_path / "resumed"
    train(ADASPLIT, folder, workers=ProcessWorkers(2), stop=stop)
    assert train(ADASPLIT, folder, workers=ProcessWorkers(1)) == inline
