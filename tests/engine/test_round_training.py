import gc
from collections import Counter
from dataclasses import dataclass, replace

import msgspec
import pytest
import torch
from tests.engine.small_runs import FEDAVG, LOCAL, NoTraining, images, network
from tests.methods.test_laws import METHODS

from pliant.compression import TopK
from pliant.data import LogNormalSizes
from pliant.data.federated import TrainTestData
from pliant.devices import ChangingTrace, Fleet
from pliant.engine.evaluation import Evaluation
from pliant.engine.ledger import TaskRecord
from pliant.engine.round_loop import RunSettings
from pliant.engine.round_rules import RoundRules
from pliant.engine.run_store import load_run_state, read_records
from pliant.engine.simulate import simulate
from pliant.engine.worker_context import WorkerContext
from pliant.methods import FedAvg, HeteroFl, Scaffold
from pliant.methods.aggregation import open_stream
from pliant.methods.base import LocalTraining, Update, train_locally
from pliant.methods.robust import Median
from pliant.methods.server_optimisers import ServerExtrapolation
from pliant.nn.elastic import Elastic
from pliant.params import get_params
from pliant.workers.pool import ProcessWorkers

DEVICES = 6
SETTINGS = RunSettings(rounds=2, per_round=DEVICES, rules=RoundRules(late="wait"))
PARTIAL = msgspec.structs.replace(SETTINGS, rules=RoundRules(late="partial"))
FLEET = Fleet(size=DEVICES, speed=ChangingTrace(low=0.5, high=1.0, per_round=2.0))


def make_data():
    """Return shares of unequal sizes, so that the updates have unequal weights."""
    return TrainTestData(images(320), images(60, seed=1)).share(
        LogNormalSizes(spread=1.0), DEVICES, proxy=20
    )


HEAVIEST = max(range(DEVICES), key=lambda device: len(make_data().shares[device]))


def run(method, settings=SETTINGS, **options):
    records = simulate(method, network(), make_data(), FLEET, settings=settings, **options)
    return list(records)


@pytest.fixture
def keep_all(monkeypatch):
    """Return a function after whose call all updates of a round are kept until it is over."""
    return lambda: monkeypatch.setattr(WorkerContext, "merges_stream", property(lambda self: False))


@pytest.mark.parametrize(
    "method",
    [*METHODS.values(), FedAvg(LOCAL, server=ServerExtrapolation())],
    ids=[*METHODS, "fedexp"],
)
def test_merging_updates_as_they_come_gives_the_same_bits(method, keep_all):
    context = WorkerContext(None, None, method)
    assert context.merges_stream
    streamed = run(method, PARTIAL)
    keep_all()
    assert not context.merges_stream
    assert run(method, PARTIAL) == streamed


def test_residuals_and_states_are_kept(keep_all):
    settings = msgspec.structs.replace(PARTIAL, rounds=3, compression=TopK(share=0.1))
    streamed = run(Scaffold(LOCAL), settings)
    keep_all()
    assert run(Scaffold(LOCAL), settings) == streamed


@dataclass(frozen=True)
class Spoiling:
    """FedAvg, but some devices send updates that are no numbers; count who trains."""

    bad: tuple[int, ...]
    trained: list[int]
    local: LocalTraining = LOCAL

    def train(self, net, task, steps):
        update = train_locally(net, task, steps, self.local.optimiser)
        self.trained.extend([task.key.device] if update.steps else [])
        if task.key.device not in self.bad or not update.steps:
            return update
        return replace(update, delta={n: t * torch.nan for n, t in update.delta.items()})


@pytest.mark.parametrize("bad", [(), (HEAVIEST,), (HEAVIEST - 1,), tuple(range(DEVICES))])
def test_rejected_updates_do_not_change_the_bits(bad, keep_all):
    method = Spoiling(bad, [])
    streamed = run(method)
    assert [record.merged for record in streamed] == [DEVICES - len(bad)] * 2
    keep_all()
    assert run(Spoiling(bad, [])) == streamed
    # only without the heaviest, by which weights are scaled, are the others trained again
    is_trained_twice = bad == (HEAVIEST,)
    counts = Counter(method.trained)
    assert {d: counts[d] for d in range(DEVICES)} == {
        d: 4 if is_trained_twice and d not in bad else 2 for d in range(DEVICES)
    }


def test_a_void_round_merges_nothing(tmp_path):
    rules = RoundRules(late="wait", quorum=1.0)
    settings = msgspec.structs.replace(SETTINGS, rules=rules, rounds=1)
    run(Spoiling((2,), []), settings, folder=tmp_path)
    before, after = get_params(network()), load_run_state(tmp_path).server_state.params
    assert all(torch.equal(before[name], after[name]) for name in before)
    tasks = [record for record in read_records(tmp_path) if isinstance(record, TaskRecord)]
    outcomes = Counter(task.outcome.partition(":")[0] for task in tasks)
    assert outcomes == {"void": DEVICES - 1, "rejected": 1}


@dataclass(frozen=True)
class Counting(NoTraining):
    """Count the updates that wait to be merged."""

    log: list[int]
    merges_stream: bool = True

    def train(self, net, task, steps):
        self.log.append(1 if any(True for _ in steps) else 0)
        return NoTraining.train(self, net, task, steps)

    def merge(self, net, state, updates):
        for _ in updates:
            self.log.append(-1)
        return state


@pytest.mark.parametrize("is_streamed", [True, False])
def test_at_most_two_updates_per_worker_wait(is_streamed):
    log = []
    run(Counting(log, is_streamed), msgspec.structs.replace(SETTINGS, rounds=1))
    waiting = [sum(log[:end]) for end in range(len(log) + 1)]
    assert waiting[-1] == 0
    assert max(waiting) == (2 if is_streamed else DEVICES)


def test_the_number_of_workers_changes_nothing():
    assert run(FEDAVG, workers=ProcessWorkers(2)) == run(FEDAVG)


def test_a_robust_merge_needs_all_updates():
    assert not WorkerContext(None, None, FedAvg(merging=Median())).merges_stream


def test_a_merge_that_reads_no_update_still_ends_every_task():
    log = []

    class Blind(Counting):
        def merge(self, net, state, updates):
            return state

    [record] = run(Blind(log), msgspec.structs.replace(SETTINGS, rounds=1))
    assert record.merged == DEVICES


def test_a_stream_keeps_no_tensors():
    tensors = {"weight": torch.zeros(2)}
    update = Update(3, tensors, 8, 1, 10.0, 0.5, extra=tensors, residual=tensors)
    stream = open_stream([update])
    assert open_stream(stream) is stream
    assert [*stream] == [update]
    [seen] = stream.seen
    assert (seen.delta, seen.extra, seen.residual, seen.device_state) == ({}, {}, {}, None)
    assert seen.samples == update.samples


def count_tensors():
    return sum(type(found) is torch.Tensor for found in gc.get_objects())


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_no_round_leaves_tensors_to_the_garbage_collector(method):
    settings = msgspec.structs.replace(PARTIAL, rounds=9)
    records = simulate(method, network(), make_data(), FLEET, settings=settings)
    counts = []
    gc.collect()
    gc.freeze()  # only new objects are counted
    gc.disable()
    try:
        for _ in range(5):
            next(records)
            counts.append(count_tensors())
    finally:
        gc.enable()
        records.close()
    assert counts[2:] == counts[2:3] * 3


@pytest.mark.parametrize("masked", [False, True])
def test_a_packed_network_is_taken_out_once_per_task(masked, monkeypatch):
    counts = Counter()
    take = Elastic.take

    def count_takes(self, params, subnet):
        counts["takes"] += 1
        return take(self, params, subnet)

    monkeypatch.setattr(Elastic, "take", count_takes)
    evaluation = Evaluation(every=9)  # at the end only
    for rounds in (1, 3):
        settings = msgspec.structs.replace(SETTINGS, rounds=rounds, evaluation=evaluation)
        before = counts["takes"]
        run(HeteroFl(LOCAL, masked=masked), settings)
        counts[rounds] = counts["takes"] - before
    # in the worker: out of the network that is sent, and out of the trained one
    assert counts[3] - counts[1] <= 2 * 2 * DEVICES + masked  # and one more for a new size
