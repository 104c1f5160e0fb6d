from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice

import pytest
from msgspec.structs import replace
from tests.engine.raw_records import check_totals
from tests.engine.small_runs import FEDAVG, FLEET, LOCAL, SETTINGS, data, network

from pliant.devices import ConstantTrace, Fleet, OnOffWindows
from pliant.engine.ledger import TaskRecord, verify_records
from pliant.engine.round_rules import RoundRules
from pliant.engine.run_store import load_run_state, read_records
from pliant.engine.selection import Oort
from pliant.engine.simulate import simulate
from pliant.methods import ConstantStaleness, FedAsync, FedBuff, Scaffold
from pliant.methods.aggregation import apply_delta, average_deltas
from pliant.methods.base import LocalTraining
from pliant.params import Params
from pliant.workers.pool import ProcessWorkers

ASYNC_SETTINGS = replace(SETTINGS, rounds=9, checkpoint_every=1)
PLAIN = replace(ASYNC_SETTINGS, rules=RoundRules())  # no device leaves
EQUAL = Fleet(size=12, speed=ConstantTrace(0.8))


@dataclass(frozen=True)
class StalenessState:
    params: Params
    staleness: int = 0  # of all updates so far


@dataclass(frozen=True)
class StaleFedAvg:
    """A method of one's own: FedAvg that trusts stale updates less, and counts their staleness."""

    concurrency: int = 4
    buffer: int = 2
    local: LocalTraining = LOCAL
    work: str = "pass"

    def init_state(self, params):
        return StalenessState(params)

    def merge(self, net, state, updates):
        delta = average_deltas(net, state.params, updates, lambda u: 1 / (1 + u.staleness))
        staleness = state.staleness + sum(update.staleness for update in updates)
        return StalenessState(apply_delta(state.params, delta), staleness)


def make_inputs():
    return network(), data()


def run(method, folder=None, *, fleet=FLEET, settings=ASYNC_SETTINGS, stop=None, **options):
    """Return the records of the merges, or only the first few as if the run was then killed."""
    options |= {"settings": settings, "folder": folder, "make_inputs": make_inputs}
    with closing(simulate(method, *make_inputs(), fleet, **options)) as records:
        return list(islice(records, stop))


def buffered(inner=FEDAVG, *, concurrency=4, buffer=2, **options):
    return FedBuff(inner, buffer, concurrency, ConstantStaleness(), **options)


def read_tasks(folder):
    return [record for record in read_records(folder) if isinstance(record, TaskRecord)]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    merged = run(StaleFedAvg(), folder)
    return merged[-1].digest, (folder / "events.jsonl").read_bytes()


@pytest.mark.parametrize("stop", [1, 2, 4, 5, 8])
def test_a_run_resumes_exactly_with_tasks_in_flight(uninterrupted, stop, tmp_path):
    run(StaleFedAvg(), tmp_path, stop=stop)
    saved = load_run_state(tmp_path, StalenessState)
    assert saved.next_round == stop
    assert saved.in_flight
    assert saved.base_params.keys() == {task.base for task in saved.in_flight}
    merged = run(StaleFedAvg(), tmp_path)
    assert (merged[-1].digest, (tmp_path / "events.jsonl").read_bytes()) == uninterrupted


def test_tasks_of_several_versions_are_saved(tmp_path):
    run(StaleFedAvg(concurrency=6, buffer=1), tmp_path, stop=6)
    assert len(load_run_state(tmp_path, StalenessState).base_params) > 1


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_number_of_workers_changes_nothing(uninterrupted, count, tmp_path):
    merged = run(StaleFedAvg(), tmp_path, workers=ProcessWorkers(count))
    assert (merged[-1].digest, (tmp_path / "events.jsonl").read_bytes()) == uninterrupted


def test_a_fleet_that_is_hardly_available_resumes_exactly(tmp_path):
    fleet = Fleet(size=4, speed=OnOffWindows(windows=((0.0, 0.6), (1.1, 1.9)), period=2.3))
    settings = replace(ASYNC_SETTINGS, select="available")
    start = partial(run, buffered(), fleet=fleet, settings=settings)
    start(tmp_path / "whole")
    for stop in (4, 3, None):
        start(tmp_path / "parts", stop=stop)
    whole, parts = ((tmp_path / name / "events.jsonl").read_bytes() for name in ("whole", "parts"))
    assert whole == parts


def test_devices_keep_their_states(tmp_path):
    settings = replace(ASYNC_SETTINGS, rounds=5)
    start = partial(run, buffered(Scaffold(LOCAL)), settings=settings)
    whole = start(tmp_path / "whole")
    start(tmp_path / "parts", stop=3)
    assert start(tmp_path / "parts")[-1].digest == whole[-1].digest


def test_each_task_has_one_end(tmp_path):
    merged = run(buffered(), tmp_path, settings=PLAIN)
    outcomes = Counter(task.outcome for task in read_tasks(tmp_path))
    assert outcomes == {"finished": 9 * 2, "surplus": 3}  # the last update was not replaced
    assert [record.merged for record in merged] == [2] * 9
    assert load_run_state(tmp_path).in_flight == ()


@pytest.mark.parametrize(
    "method",
    [buffered(), FedAsync(local=LOCAL), buffered(work="seconds", concurrency=6)],
    ids=["pass", "one by one", "seconds"],
)
@pytest.mark.parametrize("seconds", [None, 2.6])
def test_records_of_versions_agree(method, seconds, tmp_path):
    settings = replace(ASYNC_SETTINGS, seconds=seconds, rules=RoundRules("partial", dropout=0.3))
    merged = run(method, tmp_path, settings=settings)
    assert verify_records(read_records(tmp_path)) == len(merged)
    check_totals(tmp_path)
    assert seconds is None or merged[-1].seconds == seconds


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"staleness": 7}, "versions passed, but staleness is 7"),
        ({"sent_at": 0.0, "staleness": 8}, "before the one before it ended"),
    ],
)
def test_wrong_versions_and_overlapping_tasks_are_found(change, problem, tmp_path):
    run(buffered(concurrency=2, buffer=1), tmp_path, fleet=Fleet(size=2), settings=PLAIN)
    records = list(read_records(tmp_path))
    last = max(i for i, r in enumerate(records) if isinstance(r, TaskRecord) and r.steps)
    records[last] = replace(records[last], **change)
    with pytest.raises(ValueError, match=problem):
        verify_records(records)


def test_tasks_in_flight_at_the_end_cost_what_was_done_until_then(tmp_path):
    settings = replace(PLAIN, seconds=0.5)
    merged = run(buffered(), tmp_path, fleet=Fleet(size=12), settings=settings)  # 1 s per task
    [record] = merged
    assert (record.seconds, record.merged, record.outcomes) == (0.5, 0, {"surplus": 4})
    assert record.macs == pytest.approx(record.available)
    whole = run(buffered(), fleet=Fleet(size=12), settings=replace(PLAIN, rounds=1))[0]
    per_task = whole.macs / whole.tasks  # all four arrive at 1 s; two are merged
    assert record.macs == pytest.approx(4 * per_task / 2, rel=0.05)  # of 26 or 27 samples
    assert record.up == 0


def test_devices_that_leave_are_replaced():
    merged = run(buffered(), settings=replace(ASYNC_SETTINGS, rules=RoundRules(dropout=0.5)))
    assert [record.merged for record in merged] == [2] * 9
    assert sum(record.outcomes.get("dropped", 0) for record in merged) > 3


def test_tasks_of_one_length_send_what_they_have(tmp_path):
    rules = RoundRules("partial", grace=0.0)
    method = buffered(work="seconds", concurrency=2)
    fleet = Fleet(size=4, speed=ConstantTrace(0.8))
    run(method, tmp_path, fleet=fleet, settings=replace(PLAIN, rules=rules))
    tasks = [task for task in read_tasks(tmp_path) if task.outcome != "surplus"]
    assert {task.outcome for task in tasks} == {"partial"}
    assert {round(task.sent_at % 1.0, 6) for task in tasks} == {0.0}


def test_no_device_has_two_tasks(tmp_path):
    fleet = Fleet(size=4, speed=ConstantTrace(0.3, 1.0))
    merged = run(buffered(concurrency=4, buffer=3), tmp_path, fleet=fleet)
    assert [record.merged for record in merged] == [3] * 9
    verify_records(read_records(tmp_path))


def test_a_finished_run_gets_no_more_versions(tmp_path):
    run(buffered(), tmp_path)
    with pytest.raises(ValueError, match="tasks in flight have ended with it"):
        run(buffered(), tmp_path, settings=replace(ASYNC_SETTINGS, rounds=12))


@pytest.mark.parametrize(
    ("method", "change", "problem"),
    [
        (buffered(buffer=5), {}, "Expected a buffer of 1 to 4 updates, .* got 5"),
        (buffered(concurrency=None, buffer=5), {}, "Expected a buffer of 1 to 4 updates"),
        (buffered(concurrency=13), {}, "Expected a concurrency of 1 to 12 tasks, .* got 13"),
        (buffered(work="seconds"), {"rules": RoundRules("wait")}, 'rules.late = "partial"'),
        (buffered(), {"select": Oort()}, 'Expected select = "uniform" or "available"'),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_written(method, change, problem, tmp_path):
    with pytest.raises(ValueError, match=problem):
        run(method, tmp_path / "run", settings=replace(ASYNC_SETTINGS, **change))
    assert not (tmp_path / "run").exists()


def test_the_server_waits_until_devices_are_available():
    fleet = Fleet(size=12, speed=OnOffWindows(windows=((2.5, 4.0),), period=10.0))
    settings = replace(PLAIN, select="available", rounds=1)
    [record] = run(buffered(concurrency=2), fleet=fleet, settings=settings)
    assert record.seconds == 4.0  # asked at 0, 1, 2 and 3; the tasks of 3 take a second


@pytest.mark.parametrize("select", ["uniform", "available"])
def test_a_fleet_that_never_works_is_given_up(select):
    fleet = Fleet(size=12, speed=OnOffWindows(windows=((0.0, 0.0),), period=10.0))
    with pytest.raises(ValueError, match="got none since 0 s: no device is available"):
        run(buffered(), fleet=fleet, settings=replace(PLAIN, select=select))


def test_a_run_of_given_seconds_ends_without_devices():
    fleet = Fleet(size=12, speed=OnOffWindows(windows=((0.0, 0.0),), period=10.0))
    [record] = run(buffered(), fleet=fleet, settings=replace(PLAIN, seconds=20.0))
    assert (record.seconds, record.merged, record.digest is not None) == (20.0, 0, True)
