from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
import psutil
import pytest
import small
import torch
from small import FEDAVG, FLEET, LOCAL, SETTING, Nothing, events, run

from pliant.devices import Changing, Constant, DeviceClass, Fleet, Windows
from pliant.engine.evaluate import Evaluation
from pliant.engine.ledger import TaskRecord, check
from pliant.engine.rules import Rules
from pliant.engine.simulate import simulate, trained
from pliant.engine.workers import Processes
from pliant.methods import Distreal
from pliant.params import digest, params_of

DISTREAL = Distreal(local=LOCAL)
CHANGED = msgspec.structs.replace


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """A run inline, and its folder."""
    folder = tmp_path_factory.mktemp("calm") / "run"
    return run(DISTREAL, folder=folder), folder


@pytest.mark.parametrize(("count", "kills"), [(1, 0), (2, 1), (4, 2)])
def test_any_number_of_processes_killed_or_not_gives_what_inline_gives(
    calm, count, kills, tmp_path
):
    records, folder = calm
    before = set(workers_of_this())
    found, killed = [], 0
    options = {"setting": SETTING, "workers": Processes(count), "folder": tmp_path / "run"}
    for record in simulate(DISTREAL, small.network(), small.data(), FLEET, **options):
        found.append(record)
        if killed < kills:
            set(workers_of_this()).difference(before).pop().kill()
            killed += 1
    assert killed == kills
    assert found == records
    assert found[-1].digest is not None
    assert (tmp_path / "run/events.jsonl").read_bytes() == (folder / "events.jsonl").read_bytes()


def workers_of_this():
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            if "spawn_main" in " ".join(child.cmdline()):
                yield child


def test_another_seed_gives_another_result(calm):
    assert run(DISTREAL, setting=CHANGED(SETTING, seed=1))[-1].digest != calm[0][-1].digest


def test_the_network_learns_and_the_last_round_is_evaluated(calm):
    records = run(setting=CHANGED(SETTING, rounds=15, evaluation=Evaluation(every=10)))
    assert [record.round for record in records if record.score] == [9, 14]
    assert records[-1].accuracy > 0.6  # one in five by chance
    assert [record.digest for record in records[:-1]] == [None] * 14


def test_the_given_network_is_left_as_it_is():
    net = small.network()
    before = digest(params_of(net))
    list(simulate(FEDAVG, net, small.data(), FLEET, setting=SETTING))
    assert digest(params_of(net)) == before
    assert net.training


def test_rounds_can_be_said_without_a_setting():
    fleet = Fleet(size=12)
    records = list(simulate(FEDAVG, small.network(), small.data(), fleet, rounds=2))
    assert [(record.round, record.tasks, record.merged) for record in records] == [
        (0, 10, 10),
        (1, 10, 10),
    ]
    assert [record.seconds for record in records] == [1.0, 2.0]


def test_distreal_with_full_resources_is_fedavg_bit_for_bit():
    for fleet in (Fleet(size=12), Fleet(size=12, speed=Constant(1.0, 1.5))):
        setting = CHANGED(SETTING, rules=Rules())
        a, b = run(DISTREAL, fleet=fleet, setting=setting), run(fleet=fleet, setting=setting)
        assert a[-1].digest == b[-1].digest
        assert a[-1].score == b[-1].score
    scarce = Fleet(size=12, speed=Constant(0.5))
    assert run(DISTREAL, fleet=scarce)[-1].digest != run(fleet=scarce)[-1].digest


def test_no_changes_is_constant():
    still = Fleet(size=12, speed=Changing(low=0.3, high=1.0, per_round=0.0))
    constant = Fleet(size=12, speed=Constant(low=0.3, high=1.0))
    assert run(DISTREAL, fleet=still) == run(DISTREAL, fleet=constant)


@dataclass
class Seeing:
    """A method that notes what mini-batches another one is given."""

    inner: object
    seen: list = field(default_factory=list)

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def train(self, net, task, steps):
        steps = list(steps)
        if steps:  # the guard asks once what an update looks like, with none
            found = [(step.x.sum().item(), step.y.tolist()) for step in steps]
            self.seen.append((task.place, found))
        return self.inner.train(net, task, steps)


def test_two_methods_see_the_same_devices_and_the_same_data(tmp_path):
    ways = [Seeing(FEDAVG), Seeing(DISTREAL)]
    facts = []
    for number, way in enumerate(ways):
        run(way, folder=tmp_path / str(number), setting=CHANGED(SETTING, rules=Rules(late="wait")))
        tasks = [r for r in events(tmp_path / str(number)) if isinstance(r, TaskRecord)]
        facts.append([(task.round, task.device) for task in tasks])
    assert facts[0] == facts[1]
    assert ways[0].seen == ways[1].seen
    assert len(ways[0].seen) == SETTING.rounds * SETTING.per_round

    def resources(name):
        fixed = CHANGED(SETTING, rules=Rules())  # rounds of the same length
        run(FEDAVG if name == "a" else DISTREAL, folder=tmp_path / name, setting=fixed)
        tasks = [r for r in events(tmp_path / name) if isinstance(r, TaskRecord)]
        return [(task.round, task.device, task.available) for task in tasks]

    assert resources("a") == resources("b")


@pytest.mark.parametrize(
    "rules",
    [
        Rules(),
        Rules(late="partial"),
        Rules(late="wait", dropout=0.2),
        Rules(over=1.0, early=True, dropout=0.2),
        Rules(late="partial", over=0.5, grace=0.2),
        Rules(quorum=1.0),
    ],
)
@pytest.mark.parametrize("method", [Nothing(), DISTREAL])
def test_the_books_balance_whatever_the_rules(rules, method, tmp_path):
    fleet = Fleet(
        size=12,
        speed=Changing(low=0.2, high=1.2, per_round=2.0),
        classes=(
            DeviceClass(name="phone", joules_per_mac=1e-9, joules_per_byte=1e-7, up=2e5, down=1e6),
            DeviceClass(name="gateway", share=2.0, latency=0.02),
        ),
    )
    setting = CHANGED(SETTING, rounds=8, rules=rules)
    records = run(method, fleet=fleet, setting=setting, folder=tmp_path / "run")
    found = events(tmp_path / "run")
    assert check(found) == 8
    assert [record for record in found if not isinstance(record, TaskRecord)] == records
    assert sum(record.tasks for record in records) == 8 * rules.selected(4)


def test_over_selection_uses_no_more_than_wanted():
    setting = CHANGED(SETTING, rules=Rules(over=1.0))
    for record in run(Nothing(), fleet=Fleet(size=12), setting=setting):
        assert (record.tasks, record.merged) == (8, 4)
        assert record.ends == {"finished": 4, "surplus": 4}


def test_a_round_for_which_nobody_is_available_passes():
    fleet = Fleet(size=12, speed=Windows(windows=((2.0, 4.0),), period=4.0))
    records = run(fleet=fleet, setting=CHANGED(SETTING, rounds=4, select="available"))
    assert [record.tasks for record in records] == [0, 0, 4, 4]
    assert [record.seconds for record in records] == [1.0, 2.0, 3.0, 4.0]


def test_more_devices_than_there_are_is_all_of_them():
    records = run(Nothing(), fleet=Fleet(size=3), setting=CHANGED(SETTING, per_round=50))
    assert {record.tasks for record in records} == {3}


def test_a_run_that_is_stopped_saves_itself_and_can_go_on(calm, tmp_path):
    folder = tmp_path / "run"
    for stop in (1, 3, 4):
        found = run(DISTREAL, folder=folder, is_stopped=lambda stop=stop: _rounds(folder) >= stop)
        assert found[-1].round == stop
        assert trained(folder)
    assert run(DISTREAL, folder=folder)[-1] == calm[0][-1]
    assert run(DISTREAL, folder=folder) == []
    assert (folder / "events.jsonl").read_bytes() == (calm[1] / "events.jsonl").read_bytes()


def _rounds(folder):
    return sum(not isinstance(record, TaskRecord) for record in events(folder))


def test_trained_is_the_network_of_the_last_record(calm, tmp_path):
    records, folder = calm
    assert digest(trained(folder)) == records[-1].digest
    with pytest.raises(ValueError, match="expected a run with a checkpoint, found none"):
        trained(tmp_path)


def test_workers_leave_the_number_of_threads_as_it_was():
    torch.set_num_threads(1)
    for _ in simulate(Nothing(), small.network(), small.data(), FLEET, rounds=1):
        assert torch.get_num_threads() == 1
