import msgspec
import pytest
from near import Near, described, devices_of, served, simulated

from pliant.deploy.letters import Answer, Order, packed, read_answer
from pliant.deploy.post import Reply
from pliant.deploy.rounds import NotEnough
from pliant.engine.ledger import TaskRecord, check
from pliant.engine.store import events
from pliant.value import encode


def tasks(records):
    return [record for record in records if isinstance(record, TaskRecord)]


HALF = {"speed": {"type": "constant", "low": 0.5}}
CHANGING = {"speed": {"type": "changing", "low": 0.3, "high": 1.0, "per_round": 2.0}}


@pytest.mark.parametrize(
    ("method", "fleet", "late"),
    [
        ("fedavg", {}, "discard"),
        ("scaffold", {}, "discard"),  # a device's own memory stays with it
        ("distreal", HALF, "partial"),
        ("heterofl", HALF, "discard"),  # what travels is packed
        ("elfish", HALF, "discard"),  # filters of the device's own choice
        ("coherent", CHANGING, "partial"),
    ],
)
def test_a_rehearsal_ends_with_the_simulated_weights(tmp_path, method, fleet, late):
    experiment = described(method, fleet=fleet, rules={"late": late})
    link = Near(devices_of(experiment, tmp_path))
    records = served(experiment, link, tmp_path / "run", pace="fleet")
    assert check(records) == 2
    assert records[-1].digest == simulated(experiment)


def test_with_time_to_spare_a_measured_run_is_the_simulated_one_too(tmp_path):
    experiment = described("distreal")
    records = served(experiment, Near(devices_of(experiment, tmp_path)), tmp_path / "run")
    assert check(records) == 2
    assert records[-1].digest == simulated(experiment)
    assert all(task.up > 0 and task.down > task.up / 2 for task in tasks(records))


def test_a_device_keeps_what_its_rounds_have_taught_it_of_its_speed(tmp_path):
    experiment = described("distreal")
    hello = packed(Order("hello", encode(experiment), -1))

    def curve():
        return read_answer(devices_of(experiment, tmp_path)[0].answer(hello))[0].curve

    first = curve()
    assert first == curve()  # measured once
    served(experiment, Near(devices_of(experiment, tmp_path)), tmp_path / "run")
    later = curve()
    assert later != first
    assert [share for share, _ in later] == [share for share, _ in first]
    [kept] = (tmp_path / "device0").glob("curve-*.json")
    kept.write_text("[[1.0, -1.0]]")  # it makes no sense: measured anew
    assert all(seconds > 0 for _, seconds in curve())


def test_a_bad_answer_changes_nothing_and_is_named(tmp_path):
    experiment = described()

    def cut(device, round, raw):
        return raw[:-1] if device == 1 else raw

    def lost(device, round, raw):
        return Reply(1, None, "gone") if device == 1 else raw

    bad = served(experiment, Near(devices_of(experiment, tmp_path), cut), tmp_path / "bad")
    none = served(experiment, Near(devices_of(experiment, tmp_path), lost), tmp_path / "none")
    assert check(bad) == check(none) == 2
    assert bad[-1].digest == none[-1].digest
    assert tasks(bad)[1].end.startswith("rejected: device 1: expected a whole letter")
    assert tasks(none)[1].end == "dropped: gone"


class Ticking:
    """A clock that stands still but for what it is told."""

    now = 0.0

    def clock(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def test_a_device_that_says_nothing_ends_late_at_the_deadline(tmp_path):
    experiment, ticking = described(rounds=1), Ticking()

    def hanging(device, round, raw):
        ticking.now += 50.0 / 3
        return None if device == 1 else raw

    records = served(
        experiment,
        Near(devices_of(experiment, tmp_path), hanging),
        tmp_path / "run",
        clock=ticking.clock,
        sleep=ticking.sleep,
        allowance=3.0,
    )
    assert check(records) == 1
    assert [task.end for task in tasks(records)] == ["finished", "late", "finished"]
    assert 60.0 + 3.0 <= records[-1].seconds <= 60.0 + 3.0 + 0.25


def test_a_round_without_updates_is_begun_again_from_the_same_model(tmp_path):
    experiment = described(rounds=1, rules={"quorum": 1.0})
    calls = []

    def flaky(device, round, raw):
        calls.append(round)
        return Reply(device, None, "gone") if round == 0 and device == 0 else raw

    records = served(experiment, Near(devices_of(experiment, tmp_path), flaky), tmp_path / "run")
    assert check(records) == 2
    assert [task.end for task in tasks(records)][:3] == ["dropped: gone", "void", "void"]
    assert records[-1].merged == 3


def test_a_run_to_which_nothing_ever_comes_ends(tmp_path):
    experiment = described(rounds=1)

    def gone(device, round, raw):
        return Reply(device, None, "gone")

    with pytest.raises(NotEnough, match="nothing came back in 3 rounds"):
        served(
            experiment, Near(devices_of(experiment, tmp_path), gone), tmp_path / "run", retries=2
        )
    assert check(events(tmp_path / "run")) == 3  # the last of them too has its ends


def test_rounds_in_a_row_are_counted_across_restarts(tmp_path):
    experiment = described(rounds=1)
    asked = []

    class Killed(BaseException):
        pass

    def gone(device, round, raw):
        asked.append((device, round))
        if round == 2 and len(asked) == 7:
            raise Killed
        return Reply(device, None, "gone")

    devices = devices_of(experiment, tmp_path)
    with pytest.raises(Killed):
        served(experiment, Near(devices, gone), tmp_path / "run", retries=3)
    with pytest.raises(NotEnough, match="nothing came back in 4 rounds"):
        served(experiment, Near(devices, gone), tmp_path / "run", retries=3)
    assert served(experiment, Near(devices), tmp_path / "run", retries=3)[-1].merged == 3


def test_a_run_without_devices_says_so(tmp_path):
    with pytest.raises(NotEnough, match="waited for 1 devices or more, 0 came"):
        served(described(), Near({}), tmp_path / "run", patience=0.1)


@pytest.mark.parametrize("when", [0, 1])
def test_a_server_that_is_killed_goes_on_to_the_same_weights(tmp_path, when):
    experiment = described("scaffold", rounds=2)
    whole = served(experiment, Near(devices_of(experiment, tmp_path / "a")), tmp_path / "whole")

    class Killed(BaseException):
        pass

    def kill(device, round, raw):
        if round == when and device == 1:
            raise Killed
        return raw

    devices = devices_of(experiment, tmp_path / "b")
    with pytest.raises(Killed):
        served(experiment, Near(devices, kill), tmp_path / "run")
    again = devices_of(experiment, tmp_path / "b")  # devices too are new processes
    records = served(experiment, Near(again), tmp_path / "run")
    assert check(records) == 2
    assert records[-1].digest == whole[-1].digest


def test_surplus_updates_are_told_from_those_that_count(tmp_path):
    experiment = described(per_round=2, rules={"over": 0.5}, rounds=1)
    records = served(experiment, Near(devices_of(experiment, tmp_path)), tmp_path / "run")
    assert check(records) == 1
    assert records[-1].ends == {"finished": 2, "surplus": 1}


def test_an_unfinished_update_does_not_close_a_round_early(tmp_path):
    rules = {"late": "discard", "early": True, "over": 0.5, "quorum": 1.0}
    experiment = described(rounds=1, per_round=2, rules=rules)

    def shortened(device, round, raw):
        answer, tensors = read_answer(raw)
        rows = answer.rows[:-1] if device == 0 else answer.rows
        times, samples = (0.0,) * (len(rows) + 1), 16 * len(rows) if device == 0 else answer.samples
        told = {"rows": rows, "times": times, "seconds": 0.0, "samples": samples}
        return packed(msgspec.structs.replace(answer, **told), tensors)

    link = Near(devices_of(experiment, tmp_path), shortened)
    records = served(experiment, link, tmp_path / "run")
    assert check(records) == 1
    assert [task.end for task in tasks(records)][1:] == ["finished", "finished"]
    assert records[-1].merged == 2


def test_what_a_device_says_of_its_failure_is_in_the_ledger(tmp_path):
    experiment = described(rounds=1)
    devices = devices_of(experiment, tmp_path)
    devices[2] = lambda letter: packed(Answer("declined", 2, 0, "it is not charging"))
    records = served(experiment, Near(devices), tmp_path / "run")
    assert tasks(records)[2].end == "dropped: declined, it is not charging"


def test_smaller_updates_are_smaller_and_still_merge(tmp_path):
    experiment, sizes = described(rounds=1), {}
    for kind in ("plain", "fp16", "int8", "topk"):
        link = Near(devices_of(experiment, tmp_path / kind))
        squeeze = {"type": kind}
        records = served(experiment, link, tmp_path / kind / "run", squeeze=squeeze)
        assert check(records) == 1
        assert records[-1].merged == 3
        sizes[kind] = records[-1].up
    assert sizes["fp16"] < 0.55 * sizes["plain"]
    assert sizes["int8"] < 0.35 * sizes["plain"]
    assert sizes["topk"] < 0.35 * sizes["plain"]


class Away(Near):
    """A link to devices one of which is away from a certain round on."""

    def __init__(self, devices, *, since, clock):
        super().__init__(devices)
        self.since, self.clock, self.rounds, self.sent = since, clock, 0, []

    def online(self):
        return set(self.devices) - ({2} if self.rounds >= self.since else set())

    def send(self, letters, *, round, seconds):
        self.rounds += 1
        self.sent.append((self.clock.now, sorted(letters)))
        super().send(letters, round=round, seconds=seconds)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def away(tmp_path, since, **options):
    experiment, clock = described(rounds=3, rules=options.pop("rules", {})), Clock()
    link = Away(devices_of(experiment, tmp_path), since=since, clock=clock)
    given = {"clock": clock, "sleep": clock.sleep, "allowance": 15.0, "patience": 120.0} | options
    records = served(experiment, link, tmp_path / "run", **given)
    assert check(records) == 3
    return link.sent


def test_rounds_go_on_without_a_device_that_is_away_and_wait_for_it_no_longer_than_allowed(
    tmp_path,
):
    (first, all_), *later = away(tmp_path, since=1)
    assert (first, all_) == (0.0, [0, 1, 2])
    assert [devices for _, devices in later] == [[0, 1], [0, 1]]
    assert [time for time, _ in later] == pytest.approx([15.25, 30.5], abs=1.0)


def test_the_first_round_waits_longer(tmp_path):
    (first, devices), *_ = away(tmp_path, since=0)
    assert devices == [0, 1]
    assert first == pytest.approx(120.25, abs=1.0)


def test_a_quorum_is_waited_for(tmp_path):
    with pytest.raises(NotEnough, match="waited for 3 devices or more, 2 came"):
        away(tmp_path, since=1, rules={"quorum": 1.0})
