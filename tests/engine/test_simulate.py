import dataclasses
from dataclasses import dataclass

import msgspec
import pytest
import torch
from tests.engine import small_runs
from tests.engine.raw_records import check_totals
from tests.engine.small_runs import FEDAVG, FLEET, LOCAL, SETTINGS, NoTraining, data, network, run
from tests.methods.wrapped_method import WrappedMethod
from tests.workers.worker_jobs import list_workers

from pliant.data import CropFlip
from pliant.devices import ChangingTrace, ConstantTrace, DeviceClass, Fleet, OnOffWindows
from pliant.engine.evaluation import Evaluation
from pliant.engine.ledger import TaskRecord, verify_records
from pliant.engine.round_loop import RunSettings
from pliant.engine.round_rules import RoundRules
from pliant.engine.run_store import load_trained_params, read_records
from pliant.engine.simulate import simulate
from pliant.methods import Distreal, FedAvg, LocalTraining, LrSchedule
from pliant.nn.optimisers import Sgd
from pliant.params import digest, get_params
from pliant.workers.pool import ProcessWorkers

DISTREAL = Distreal(local=LOCAL)
replace = msgspec.structs.replace
PLAIN = replace(SETTINGS, rules=RoundRules())  # all updates in time


@pytest.fixture(scope="module")
def inline_run(tmp_path_factory):
    """Return the records and the folder of an inline run."""
    folder = tmp_path_factory.mktemp("inline") / "run"
    return run(DISTREAL, folder=folder), folder


@pytest.mark.parametrize(("count", "kills"), [(1, 0), (2, 1)])
def test_process_workers_killed_or_not_give_what_inline_gives(inline_run, count, kills, tmp_path):
    records, folder = inline_run
    others = set(list_workers())
    process_records, killed = [], 0
    options = {"settings": SETTINGS, "workers": ProcessWorkers(count), "folder": tmp_path / "run"}
    for record in simulate(DISTREAL, network(), data(), FLEET, **options):
        process_records.append(record)
        if killed < kills:
            set(list_workers()).difference(others).pop().kill()
            killed += 1
    assert killed == kills
    assert process_records == records
    assert process_records[-1].digest is not None
    assert (tmp_path / "run/events.jsonl").read_bytes() == (folder / "events.jsonl").read_bytes()


def test_augmented_images_are_the_same_in_a_worker_process(inline_run):
    local = replace(LOCAL, augment=CropFlip(pad=2))
    records = run(Distreal(local=local))
    assert records[-1].digest != inline_run[0][-1].digest
    assert run(Distreal(local=local), workers=ProcessWorkers(1)) == records


def test_another_seed_gives_another_result(inline_run):
    assert run(DISTREAL, settings=replace(SETTINGS, seed=1))[-1].digest != inline_run[0][-1].digest


def test_the_network_learns_and_the_last_round_is_evaluated(inline_run):
    records = run(settings=replace(SETTINGS, rounds=15, evaluation=Evaluation(every=10)))
    assert [record.round for record in records if record.score] == [9, 14]
    assert records[-1].accuracy > 0.6  # chance is 0.2
    assert [record.digest for record in records[:-1]] == [None] * 14


def test_the_given_network_is_not_changed():
    net = network()
    before = digest(get_params(net))
    list(simulate(FEDAVG, net, data(), FLEET, settings=SETTINGS))
    assert digest(get_params(net)) == before
    assert net.training


def test_rounds_can_be_given_without_settings():
    fleet = Fleet(size=12)
    records = list(simulate(FEDAVG, network(), data(), fleet, rounds=2))
    counts = [(record.round, record.tasks, record.merged) for record in records]
    assert counts == [(0, 10, 10), (1, 10, 10)]
    assert [record.seconds for record in records] == [1.0, 2.0]


def test_distreal_with_full_resources_is_fedavg_bit_for_bit():
    for fleet in (Fleet(size=12), Fleet(size=12, speed=ConstantTrace(1.0, 1.5))):
        settings = replace(SETTINGS, rules=RoundRules())
        a, b = run(DISTREAL, fleet=fleet, settings=settings), run(fleet=fleet, settings=settings)
        assert a[-1].digest == b[-1].digest
        assert a[-1].score == b[-1].score
    slow = Fleet(size=12, speed=ConstantTrace(0.5))
    assert run(DISTREAL, fleet=slow)[-1].digest != run(fleet=slow)[-1].digest


def test_a_trace_without_changes_is_constant():
    unchanging = Fleet(size=12, speed=ChangingTrace(low=0.3, high=1.0, per_round=0.0))
    constant = Fleet(size=12, speed=ConstantTrace(low=0.3, high=1.0))
    assert run(DISTREAL, fleet=unchanging) == run(DISTREAL, fleet=constant)


class RecordingMethod(WrappedMethod):
    """A method that records the mini-batches that another one trains on."""

    def __init__(self, inner):
        super().__init__(inner)
        self.seen = []

    def train(self, net, task, steps):
        steps = list(steps)
        if steps:  # manifests are built with none
            batches = [(step.x.sum().item(), step.y.tolist()) for step in steps]
            self.seen.append((task.key, batches))
        return super().train(net, task, steps)


def test_two_methods_see_the_same_devices_and_the_same_data(tmp_path):
    methods = [RecordingMethod(FEDAVG), RecordingMethod(DISTREAL)]
    selected = []
    settings = replace(SETTINGS, rules=RoundRules(late="wait"))
    for number, method in enumerate(methods):
        folder = tmp_path / str(number)
        run(method, folder=folder, settings=settings)
        selected.append([(task.round, task.device) for task in load_tasks(folder)])
    assert selected[0] == selected[1]
    assert dict(methods[0].seen) == dict(methods[1].seen)  # the costliest are trained first
    assert len(methods[0].seen) == SETTINGS.rounds * SETTINGS.per_round

    def measure_available(method, folder):
        settings = replace(SETTINGS, rules=RoundRules(grace=0.0))  # rounds of the same length
        run(method, folder=folder, settings=settings)
        return [(task.round, task.device, task.available) for task in load_tasks(folder)]

    fedavg = measure_available(FEDAVG, tmp_path / "fedavg")
    assert fedavg == measure_available(DISTREAL, tmp_path / "distreal")


def load_tasks(folder):
    return [record for record in read_records(folder) if isinstance(record, TaskRecord)]


@pytest.mark.parametrize(
    "rules",
    [
        RoundRules(),
        RoundRules(late="partial"),
        RoundRules(late="wait", dropout=0.2),
        RoundRules(over_selection=1.0, close_early=True, dropout=0.2),
        RoundRules(late="partial", over_selection=0.5, grace=0.2),
        RoundRules(quorum=1.0),
    ],
)
@pytest.mark.parametrize("method", [NoTraining(), DISTREAL])
def test_the_records_agree_whatever_the_rules(rules, method, tmp_path):
    fleet = Fleet(
        size=12,
        speed=ChangingTrace(low=0.2, high=1.2, per_round=2.0),
        classes=(
            DeviceClass(name="phone", joules_per_mac=1e-9, joules_per_byte=1e-7, up=2e5, down=1e6),
            DeviceClass(name="gateway", share=2.0, latency=0.02),
        ),
    )
    settings = replace(SETTINGS, rounds=8, rules=rules)
    records = run(method, fleet=fleet, settings=settings, folder=tmp_path / "run")
    saved = list(read_records(tmp_path / "run"))
    assert verify_records(saved) == check_totals(tmp_path / "run") == 8
    assert [record for record in saved if not isinstance(record, TaskRecord)] == records
    assert sum(record.tasks for record in records) == 8 * rules.selection_size(4)


def test_over_selection_merges_no_more_than_the_target():
    settings = replace(SETTINGS, rules=RoundRules(over_selection=1.0))
    for record in run(NoTraining(), fleet=Fleet(size=12), settings=settings):
        assert (record.tasks, record.merged) == (8, 4)
        assert record.outcomes == {"finished": 4, "surplus": 4}


def test_a_round_without_available_devices_passes():
    fleet = Fleet(size=12, speed=OnOffWindows(windows=((2.0, 4.0),), period=4.0))
    settings = replace(SETTINGS, rounds=4, select="available", rules=RoundRules())
    records = run(fleet=fleet, settings=settings)
    assert [record.tasks for record in records] == [0, 0, 4, 4]
    assert [record.seconds for record in records] == [1.0, 2.0, 3.0, 4.0]


def test_selecting_more_devices_than_exist_selects_all():
    records = run(NoTraining(), fleet=Fleet(size=3), settings=replace(SETTINGS, per_round=50))
    assert {record.tasks for record in records} == {3}


def test_a_stopped_run_saves_itself_and_can_be_resumed(inline_run, tmp_path):
    folder = tmp_path / "run"
    for stop in (1, 3, 4):
        records = run(DISTREAL, folder=folder, is_stopped=lambda n=stop: count_rounds(folder) >= n)
        assert records[-1].round == stop
        assert load_trained_params(folder)
    assert run(DISTREAL, folder=folder)[-1] == inline_run[0][-1]
    assert run(DISTREAL, folder=folder) == []
    assert (folder / "events.jsonl").read_bytes() == (inline_run[1] / "events.jsonl").read_bytes()


def count_rounds(folder):
    return sum(not isinstance(record, TaskRecord) for record in read_records(folder))


def test_the_trained_params_are_those_of_the_last_record(inline_run, tmp_path):
    records, folder = inline_run
    assert digest(load_trained_params(folder)) == records[-1].digest
    with pytest.raises(ValueError, match="expected a run with a checkpoint, found none"):
        load_trained_params(tmp_path)


def test_a_simulation_uses_one_thread_and_restores_their_number():
    torch.set_num_threads(3)
    try:
        counts = [
            torch.get_num_threads()
            for _ in simulate(NoTraining(), network(), data(), FLEET, rounds=2)
        ]
        assert counts == [1, 1]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(1)


def test_the_ledger_counts_the_mini_batches_whose_budget_was_too_small(tmp_path):
    settings = RunSettings(rounds=1, per_round=2, rules=RoundRules(late="partial"))
    fleet = Fleet(size=12, speed=ConstantTrace(0.2))
    run(DISTREAL, fleet=fleet, settings=settings, folder=tmp_path)
    task = load_tasks(tmp_path)[0]
    assert task.short == len(task.rows) > 0
    assert set(task.rows) == {0}


@dataclass(frozen=True)
class PartlyFaulty(small_runs.StatefulFedAvg):
    """Some devices send NaN."""

    faulty: frozenset[int] = frozenset()

    def train(self, net, task, steps):
        update = super().train(net, task, steps)
        if task.key.device not in self.faulty:
            return update
        return dataclasses.replace(
            update, delta={n: t * torch.nan for n, t in update.delta.items()}
        )


def run_with_faults(folder, faulty, quorum):
    settings = replace(SETTINGS, rounds=2, per_round=4, rules=RoundRules(quorum=quorum))
    fleet = Fleet(size=4)  # all devices are selected and in time
    method = PartlyFaulty(faulty=frozenset(faulty))
    totals = list(simulate(method, network(), data(4), fleet, settings=settings, folder=folder))
    assert verify_records(read_records(folder)) == 2
    return load_tasks(folder), totals, digest(load_trained_params(folder))


def test_with_too_few_valid_updates_a_round_is_void(tmp_path):
    tasks, totals, trained = run_with_faults(tmp_path, {0, 2}, quorum=0.75)
    assert [task.outcome.partition(":")[0] for task in tasks] == ["rejected", "void"] * 4
    assert [total.merged for total in totals] == [0, 0]
    assert totals[0].outcomes == {"rejected": 2, "void": 2}
    assert all(task.useful == task.steps == task.samples == 0 for task in tasks)
    assert all(task.macs > 0 and task.up > 0 for task in tasks)  # the work was done all the same
    assert trained == digest(get_params(network()))


@pytest.mark.parametrize(("faulty", "quorum"), [({0, 2}, 0.5), ({0}, 0.75), (set(), 1.0)])
def test_with_enough_valid_updates_the_others_are_merged(tmp_path, faulty, quorum):
    tasks, totals, trained = run_with_faults(tmp_path, faulty, quorum)
    assert [total.merged for total in totals] == [4 - len(faulty)] * 2
    assert {task.device for task in tasks if task.outcome == "finished"} == {0, 1, 2, 3} - faulty
    assert trained != digest(get_params(network()))


def test_a_fleet_below_per_round_takes_part_as_a_whole():
    fleet = Fleet(size=3, speed=ConstantTrace(2.0))
    rules = RoundRules(quorum=1.0, close_early=True)
    records = run(fleet=fleet, settings=RunSettings(rounds=2, per_round=10, rules=rules))
    assert [(r.tasks, r.merged, r.seconds) for r in records] == [(3, 3, 0.5), (3, 3, 1.0)]


def test_too_few_available_devices_do_not_meet_the_quorum():
    fleet = Fleet(size=4, classes=(DeviceClass(), DeviceClass(speed=ConstantTrace(0.0))))
    rules = RoundRules(quorum=1.0)
    settings = RunSettings(rounds=1, per_round=4, select="available", rules=rules)
    [record] = run(fleet=fleet, settings=settings)
    assert 0 < record.tasks < 4
    assert record.outcomes == {"void": record.tasks}


def test_training_that_stands_still_is_logged_once(caplog):
    diverging = FedAvg(replace(LOCAL, optimiser=Sgd(lr=1e30)))
    fleet = Fleet(size=2)
    records = run(diverging, fleet=fleet, settings=RunSettings(rounds=5, per_round=2))
    assert [record.merged for record in records] == [0] * 5
    [message] = [record.getMessage() for record in caplog.records]
    assert message == (
        "no update was merged in rounds 1 to 3: in the last, 2 rejected, "
        "rejected: device 0: expected a finite loss or none, got nan"
    )


def test_two_empty_rounds_are_not_logged(caplog):
    fleet = Fleet(size=2, speed=OnOffWindows(windows=((2.0, 3.0),), period=3.0))
    settings = RunSettings(rounds=6, per_round=2, select="available")
    assert [record.merged for record in run(fleet=fleet, settings=settings)] == [0, 0, 2] * 2
    assert not caplog.records


def test_rounds_without_devices_are_logged(caplog):
    settings = RunSettings(rounds=4, select="available")
    run(fleet=Fleet(size=2, speed=ConstantTrace(0.0)), settings=settings)
    [message] = [record.getMessage() for record in caplog.records]
    assert message == ("no update was merged in rounds 1 to 3: in the last, no device was selected")


class BadState(small_runs.StatefulFedAvg):
    """A device state that no checkpoint can hold."""

    def init_device_state(self, params):
        return dataclasses.make_dataclass("Notes", [("text", str)])("")


class UndeclaredState(small_runs.StatefulFedAvg):
    """A device state without a declaration: a resumed run could not rebuild it."""

    init_device_state = None

    def train(self, net, task, steps):
        declared = dataclasses.replace(task, device_state=small_runs.LastDelta())
        return super().train(net, declared, steps)


def test_a_state_that_cannot_be_saved_is_refused_before_the_folder_is_made(tmp_path):
    with pytest.raises(ValueError, match=r"^Notes.text: expected a Tensor, .*, got str$"):
        run(BadState(), folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_undeclared_device_state_is_refused():
    message = "`init_device_state` returns, NoneType, got LastDelta"
    with pytest.raises(ValueError, match=message):
        run(UndeclaredState())


def test_mini_batches_need_not_be_recorded(tmp_path):
    plain = run(folder=tmp_path / "plain")
    settings = replace(SETTINGS, step_records=False)
    assert run(settings=settings, folder=tmp_path / "small") == plain
    records = list(read_records(tmp_path / "small"))
    assert verify_records(records) == len(plain)
    expected = [
        replace(record, starts=(), ends=(), rows=()) if isinstance(record, TaskRecord) else record
        for record in read_records(tmp_path / "plain")
    ]
    assert records == expected
    assert any(task.steps and not task.starts for task in records if isinstance(task, TaskRecord))


def test_a_run_ends_with_the_round_that_passes_its_seconds():
    fleet = Fleet(size=4, round_seconds=0.1)  # ten of them are 0.9999999999999999 s
    records = run(fleet=fleet, settings=replace(PLAIN, seconds=1.0, rounds=3))
    assert len(records) == 10
    assert [record.digest is not None for record in records] == [False] * 9 + [True]


def test_networks_are_evaluated_when_seconds_have_passed():
    fleet, evaluation = Fleet(size=4, round_seconds=0.4), Evaluation(every_seconds=1.0)
    records = run(fleet=fleet, settings=replace(PLAIN, rounds=6, evaluation=evaluation))
    # the rounds close at 0.4, 0.8, 1.2, 1.6, 2.0 and 2.4; the last one is always evaluated
    assert [record.round for record in records if record.score] == [2, 4, 5]


def test_schedules_follow_the_seconds_of_a_run():
    schedule = LrSchedule(kind="steps", at=(0.5,), factor=0.1)
    method = FedAvg(LocalTraining(batch=8, schedule=schedule))
    settings = replace(PLAIN, seconds=2.0)
    halves = run(method, fleet=Fleet(size=12, round_seconds=0.5), settings=settings)
    rounds = run(method, fleet=Fleet(size=12), settings=replace(settings, seconds=None, rounds=4))
    assert halves[-1].digest == rounds[-1].digest
