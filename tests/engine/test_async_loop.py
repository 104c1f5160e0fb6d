from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice

import pytest
from msgspec.structs import replace
from tests.engine.small_runs import FEDAVG, FLEET, LOCAL, SETTINGS, data, network
from tests.engine.small_runs import run as run_rounds_in_sync

from pliant.devices import ConstantTrace, Fleet, OnOffWindows
from pliant.engine.async_loop import AsyncDevices
from pliant.engine.local_work import run_job
from pliant.engine.round_loop import Run, run_rounds
from pliant.engine.round_rules import RoundRules
from pliant.engine.run_store import RunState, RunStore, load_run_state, read_records
from pliant.engine.worker_context import build_context, build_worker_context
from pliant.methods import Scaffold
from pliant.methods.aggregation import apply_delta, average_deltas
from pliant.methods.base import LocalTraining
from pliant.methods.state import init_states
from pliant.nn.elastic import ElasticOptions
from pliant.params import Params, get_params
from pliant.workers.pool import InlineWorkers, ProcessWorkers, open_pool

ASYNC_SETTINGS = replace(SETTINGS, rounds=9, checkpoint_every=1)


@dataclass(frozen=True)
class StalenessState:
    params: Params
    staleness: int = 0  # of all updates so far


@dataclass(frozen=True)
class StaleFedAvg:
    """FedAvg that trusts stale updates less, and counts their staleness."""

    local: LocalTraining = LOCAL

    def init_state(self, params):
        return StalenessState(params)

    def merge(self, net, state, updates):
        delta = average_deltas(net, state.params, updates, lambda u: 1 / (1 + u.staleness))
        staleness = state.staleness + sum(update.staleness for update in updates)
        return StalenessState(apply_delta(state.params, delta), staleness)


def make_inputs():
    return network(), data()


def run_async(
    method,
    folder=None,
    *,
    fleet=FLEET,
    settings=ASYNC_SETTINGS,
    workers=None,
    concurrency=4,
    buffer=2,
    stop=None,
    keys=None,
):
    """Return the records of the merges, or only the first few as if the run was then killed."""
    context = build_context(*make_inputs(), method)
    setup = partial(build_worker_context, make_inputs, method, ElasticOptions())
    server_state, device_state = init_states(method, get_params(network()))
    store = RunStore(folder) if folder else None
    with open_pool(workers or InlineWorkers(), setup, run_job) as pool:
        if keys is not None:
            submit = pool.submit
            pool.submit = lambda job, version: (keys.append(job.key), submit(job, version))[1]
        state = store.resume(type(server_state), type(device_state)) if store else None
        run = Run(context, fleet, settings, state or RunState(0, 0.0, server_state, {}))
        devices = AsyncDevices(pool, concurrency=concurrency, buffer=buffer)
        with closing(run_rounds(run, devices, store)) as records:
            merged = list(islice(records, stop))
        if store:
            store.close()
        return run, merged


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    _, merged = run_async(StaleFedAvg(), folder)
    return merged[-1].digest, (folder / "events.jsonl").read_bytes()


@pytest.mark.parametrize("stop", [1, 2, 4, 5, 8])
def test_a_run_resumes_exactly_with_tasks_in_flight(uninterrupted, stop, tmp_path):
    run_async(StaleFedAvg(), tmp_path, stop=stop)
    saved = load_run_state(tmp_path, StalenessState)
    assert saved.next_round == stop
    assert len(saved.in_flight) == 2  # of four: the updates of the others were merged
    assert saved.base_params.keys() == {task.base for task in saved.in_flight}
    _, merged = run_async(StaleFedAvg(), tmp_path)
    assert (merged[-1].digest, (tmp_path / "events.jsonl").read_bytes()) == uninterrupted


def test_tasks_of_several_versions_are_saved(tmp_path):
    run_async(StaleFedAvg(), tmp_path, stop=6, concurrency=6, buffer=1)
    assert len(load_run_state(tmp_path, StalenessState).base_params) > 1


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_number_of_workers_changes_nothing(uninterrupted, count, tmp_path):
    _, merged = run_async(StaleFedAvg(), tmp_path, workers=ProcessWorkers(count))
    assert (merged[-1].digest, (tmp_path / "events.jsonl").read_bytes()) == uninterrupted


def test_a_fleet_that_is_too_small_resumes_in_the_middle_of_an_instant(tmp_path):
    run = partial(run_async, FEDAVG, fleet=Fleet(size=3, speed=ConstantTrace(0.8)))
    _, whole = run(tmp_path / "whole")
    run(tmp_path / "parts", stop=4)
    assert run(tmp_path / "parts")[1][-1].digest == whole[-1].digest


def test_devices_keep_their_states(tmp_path):
    settings = replace(ASYNC_SETTINGS, rounds=5)
    _, whole = run_async(Scaffold(LOCAL), tmp_path / "whole", settings=settings)
    run_async(Scaffold(LOCAL), tmp_path / "parts", settings=settings, stop=3)
    _, parts = run_async(Scaffold(LOCAL), tmp_path / "parts", settings=settings)
    assert parts[-1].digest == whole[-1].digest


def test_each_task_has_one_end(tmp_path):
    settings = replace(ASYNC_SETTINGS, rules=RoundRules())
    keys = []
    run, merged = run_async(FEDAVG, tmp_path, settings=settings, keys=keys)
    tasks = [record for record in read_records(tmp_path) if hasattr(record, "outcome")]
    assert len(set(keys)) == len(keys)
    assert Counter(task.device for task in tasks) == Counter(key.device for key in keys)
    outcomes = Counter(task.outcome for task in tasks)
    assert outcomes == {"finished": 9 * 2, "surplus": 2}
    assert [record.merged for record in merged] == [2] * 9
    assert run.state.in_flight == ()


def test_devices_that_leave_are_replaced(tmp_path):
    settings = replace(ASYNC_SETTINGS, rules=RoundRules(dropout=0.5))
    _, merged = run_async(FEDAVG, settings=settings)
    assert [record.merged for record in merged] == [2] * 9
    assert sum(record.outcomes.get("dropped", 0) for record in merged) > 3


def test_equal_devices_merged_together_are_rounds():
    fleet = Fleet(size=12, speed=ConstantTrace(0.8))
    settings = replace(SETTINGS, rules=RoundRules(late="wait"))
    expected = run_rounds_in_sync(fleet=fleet, settings=settings)
    _, merged = run_async(FEDAVG, fleet=fleet, settings=settings, concurrency=4, buffer=4)
    assert merged == expected


def test_staleness_counts_the_merges_since_a_task_was_sent():
    fleet = Fleet(size=12, speed=ConstantTrace(0.8))
    settings = replace(ASYNC_SETTINGS, rules=RoundRules())
    run, _ = run_async(StaleFedAvg(), fleet=fleet, settings=settings, concurrency=6, buffer=2)
    # 6 tasks end at one instant: 2 are merged at once, 2 after one merge, 2 after two
    assert run.state.server_state.staleness == 3 * (0 + 0 + 1 + 1 + 2 + 2)


def test_no_device_has_two_tasks():
    fleet = Fleet(size=4, speed=ConstantTrace(0.3, 1.0))
    _, merged = run_async(FEDAVG, fleet=fleet, concurrency=4, buffer=3)
    assert [record.merged for record in merged] == [3] * 9


def test_a_buffer_above_the_number_of_tasks_would_never_fill():
    with pytest.raises(ValueError, match="Expected a buffer of 1 to 4 updates, got 5"):
        run_async(FEDAVG, concurrency=4, buffer=5)


def test_the_server_waits_until_devices_are_available():
    fleet = Fleet(size=12, speed=OnOffWindows(windows=((2.5, 4.0),), period=10.0))
    settings = replace(ASYNC_SETTINGS, select="available", rounds=1, rules=RoundRules())
    _, [record] = run_async(FEDAVG, fleet=fleet, settings=settings, concurrency=2)
    assert record.seconds == 4.0  # asked at 0, 1, 2 and 3; the tasks of 3 take a second
