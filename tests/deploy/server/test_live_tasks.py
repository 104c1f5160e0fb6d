"""Asynchronous runs on real devices, by a clock that only sleeping and training move."""

from collections import Counter
from itertools import pairwise

import pytest
from tests.deploy.bad_replies import BAD_REPLIES
from tests.deploy.in_process import (
    InProcessTransport,
    make_devices,
    make_experiment,
    serve_rounds,
)

from pliant.deploy.messages import TrainReply, TrainRequest, decode_message, encode_message
from pliant.deploy.server.replies import RawReply
from pliant.deploy.server.rounds import NotEnoughDevices
from pliant.engine.ledger import RoundRecord, TaskRecord, verify_records
from pliant.engine.run_store import load_run_state
from pliant.methods.scaffold import ScaffoldState

LOCAL = {"batch": 16}
FEDASYNC = {"type": "fedasync", "concurrency": 2, "local": LOCAL}
FEDBUFF = {
    "type": "fedbuff",
    "buffer": 2,
    "concurrency": 3,
    "inner": {"type": "scaffold", "local": LOCAL},
}


def select_tasks(records):
    return [record for record in records if isinstance(record, TaskRecord)]


class LiveFleet(InProcessTransport):
    """Devices that reply after some seconds of a clock that only sleeping moves.

    A function in `events` is called, once, as soon as a device has been sent so many requests.
    """

    def __init__(self, devices, seconds, **options):
        super().__init__(devices, **options)
        self.seconds, self.now = seconds, 0.0
        self.away, self.lost, self.sent = set(), set(), Counter()
        self.events = {}

    def clock(self):
        self.now += 1e-6  # no two events are simultaneous
        return self.now

    def sleep(self, seconds):
        self.now += seconds

    def find_online_devices(self):
        return super().find_online_devices() - self.away

    def find_lost_devices(self):
        return self.lost

    def send(self, requests, *, round, seconds, adds=False):
        assert adds
        super().send(requests, round=round, seconds=seconds, adds=adds)
        self.waiting = [(*entry, self.now)[:4] for entry in self.waiting]
        for device in requests:
            self.sent[device] += 1
            self.events.pop((device, self.sent[device]), lambda: None)()

    def poll_replies(self):
        waiting, self.waiting = self.waiting, []
        replies = []
        for device, round, request, sent_at in waiting:
            if self.now < sent_at + self.seconds[device] or device in self.away | self.lost:
                self.waiting.append((device, round, request, sent_at))
                continue
            raw = self.tamper(device, round, self.devices[device].handle_request(request))
            if raw is not None:
                replies.append(raw if isinstance(raw, RawReply) else RawReply(device, raw))
        return replies


def serve(experiment, fleet, folder, **options):
    return serve_rounds(experiment, fleet, folder, fleet.clock, fleet.sleep, **options)


def make_fleet(experiment, folder, seconds=(2.0, 3.0, 5.0), **options):
    return LiveFleet(make_devices(experiment, folder), seconds, **options)


def make_async(method=FEDASYNC, **fields):
    return make_experiment(method, **{"rounds": 8, "data": {"proxy": 7950}} | fields)


def test_a_device_gets_a_new_task_as_soon_as_an_update_is_in(tmp_path):
    experiment = make_async(FEDASYNC | {"concurrency": 3})
    fleet = make_fleet(experiment, tmp_path)
    records = serve(experiment, fleet, tmp_path / "run")
    assert verify_records(records) == 8
    tasks = [task for task in select_tasks(records) if task.outcome == "finished"]
    starts = {d: [round(t.sent_at, 2) for t in tasks if t.device == d] for d in range(3)}
    assert starts == {0: [0.0, 2.0, 4.0, 6.0], 1: [0.0, 3.0, 6.0], 2: [0.0]}
    assert [task.staleness for task in tasks] == [0, 1, 1, 3, 2, 2, 0, 2]
    assert load_run_state(tmp_path / "run").in_flight == ()


def test_other_devices_fill_the_slots_while_an_update_waits(tmp_path):
    experiment = make_async(FEDBUFF | {"concurrency": 2})
    fleet = make_fleet(experiment, tmp_path)
    records = serve(experiment, fleet, tmp_path / "run")
    assert verify_records(records) == 8
    assert {record.merged for record in records if isinstance(record, RoundRecord)} == {2}
    assert min(fleet.sent.values()) > 2


class Killed(BaseException):
    """The server's process ends here."""


@pytest.mark.parametrize("count", [1, 4, 6])
def test_tasks_in_flight_are_sent_again_after_a_kill(tmp_path, count):
    experiment = make_async(FEDBUFF)
    fleet = make_fleet(experiment, tmp_path)

    def kill():
        raise Killed

    fleet.events = {(0, count): kill}
    with pytest.raises(Killed):
        serve(experiment, fleet, tmp_path / "run")
    saved = load_run_state(tmp_path / "run", ScaffoldState)
    restarted = make_fleet(experiment, tmp_path)
    records = serve(experiment, restarted, tmp_path / "run")
    assert verify_records(records) == 8
    tasks = select_tasks(records)
    assert (saved is None) == (count == 1)
    in_flight = [] if saved is None else saved.in_flight
    for task in in_flight:
        same = [t for t in tasks if (t.device, t.sent_at) == (task.key.device, task.sent_at)]
        assert len(same) == 1  # it has one end
        assert same[0].outcome in ("finished", "surplus")
    assert len({(task.device, task.sent_at) for task in tasks}) == len(tasks)


def test_a_vanished_device_s_task_ends_late_and_its_slot_is_used(tmp_path):
    experiment = make_async(FEDASYNC | {"work": "seconds"}, rounds=60)
    fleet = make_fleet(experiment, tmp_path, tamper=lambda d, n, raw: None if d == 1 else raw)
    records = serve(experiment, fleet, tmp_path / "run", allowance=3.0)
    assert verify_records(records) == 60
    first, *_ = [task for task in select_tasks(records) if task.device == 1]
    window = 60.0 * (1 + experiment.rules.grace) + 3.0
    assert first.outcome == "late"
    [end] = [r.seconds for r in records if isinstance(r, RoundRecord) and r.round == first.round]
    assert window <= end <= window + 6.0
    after = [task for task in select_tasks(records) if task.sent_at > end]
    assert {task.device for task in after} >= {0, 2}


def test_a_device_that_restarts_loses_its_task_and_gets_another(tmp_path):
    experiment = make_async(FEDASYNC | {"concurrency": 3}, rounds=60)
    fleet = make_fleet(experiment, tmp_path)
    fleet.events = {(1, 2): lambda: fleet.lost.add(1), (0, 9): fleet.lost.clear}
    records = serve(experiment, fleet, tmp_path / "run")
    assert verify_records(records) == 60
    outcomes = [task.outcome for task in select_tasks(records) if task.device == 1]
    assert outcomes[:3] == ["finished", "dropped: the device has left or was restarted", "finished"]


def test_bad_replies_end_their_tasks_and_merge_nothing(tmp_path):
    experiment = make_async(FEDASYNC | {"concurrency": 3}, rounds=4 * len(BAD_REPLIES))
    kinds, bad = dict(BAD_REPLIES), []

    def spoil(device, round, raw):
        if device != 1 or not kinds:
            return raw
        bad.append(next(iter(kinds)))
        return kinds.pop(bad[-1])(raw)

    fleet = make_fleet(experiment, tmp_path, (40.0, 2.0, 50.0), tamper=spoil)
    records = serve(experiment, fleet, tmp_path / "run")
    assert verify_records(records) == experiment.rounds
    tasks = [task for task in select_tasks(records) if task.device == 1]
    assert len(bad) == len(BAD_REPLIES)
    for kind, task in zip(bad, tasks, strict=False):
        assert task.outcome.startswith(("rejected: ", "dropped: ")), kind
        assert (task.steps, task.useful) == (0, 0.0)
    sent = [task.sent_at for task in tasks[: len(bad)]]
    # a device whose task failed gets another one, but only one per round length
    assert all(60.0 <= after - before <= 61.0 for before, after in pairwise(sent))
    assert {record.merged for record in records if isinstance(record, RoundRecord)} == {1}
    assert tasks[len(bad)].outcome == "finished"


def test_a_reply_counts_once(tmp_path):
    experiment = make_async()
    first = {}

    def replay(device, round, raw):
        return first.setdefault(device, raw) if device == 0 else raw

    fleet = make_fleet(experiment, tmp_path, tamper=replay)
    records = serve(experiment, fleet, tmp_path / "run")
    outcomes = [task.outcome for task in select_tasks(records) if task.device == 0]
    assert outcomes[0] == "finished"
    assert outcomes[1].startswith("rejected: device 0: expected a reply to round")

    def forge(device, round, raw):
        reply, tensors = decode_message(raw, TrainReply)
        old = decode_message(first[0], TrainReply)[0]
        assert old.nonce != reply.nonce
        reply = TrainReply(
            **{n: getattr(reply, n) for n in reply.__struct_fields__} | {"nonce": old.nonce}
        )
        return encode_message(reply, tensors) if device == 0 else raw

    fleet = make_fleet(experiment, tmp_path, tamper=forge)
    records = serve(experiment, fleet, tmp_path / "forged")
    forged = [task.outcome for task in select_tasks(records) if task.device == 0]
    assert "expected the nonce of the request" in forged[0]


def test_a_run_without_enough_devices_gives_up(tmp_path):
    experiment = make_async(FEDBUFF)
    fleet = make_fleet(experiment, tmp_path)
    fleet.away = {1, 2}
    with pytest.raises(NotEnoughDevices, match="expected 2 or more devices online, got 1"):
        serve(experiment, fleet, tmp_path / "run", patience=30.0)
    assert 32.0 < fleet.now < 33.0  # its update came after 2 s


def test_a_run_without_valid_updates_gives_up(tmp_path):
    experiment = make_async(FEDASYNC | {"work": "seconds"})

    def decline(device, round, raw):
        nonce = decode_message(raw, TrainReply)[0].nonce
        return encode_message(TrainReply("declined", device, round, "on battery", nonce=nonce))

    fleet = make_fleet(experiment, tmp_path, tamper=decline)
    with pytest.raises(NotEnoughDevices, match="no device has sent a valid update for"):
        serve(experiment, fleet, tmp_path / "run", allowance=3.0, retries=1)
    assert fleet.sent[0] <= 4  # not again and again


def test_devices_take_the_time_they_need_for_a_pass(tmp_path):
    experiment = make_async(FEDASYNC, rounds=2, rules={"late": "discard"})
    requests = []
    fleet = make_fleet(experiment, tmp_path, (200.0, 210.0, 220.0))  # a round has 60 s
    fleet.devices = dict(fleet.devices)
    for agent in fleet.devices.values():
        handle = agent.handle_request
        agent.handle_request = lambda raw, handle=handle: (
            requests.append(decode_message(raw, TrainRequest)[0]) or handle(raw)
        )
    records = serve(experiment, fleet, tmp_path / "run")
    tasks = [task for task in select_tasks(records) if task.outcome != "surplus"]
    assert [task.outcome for task in tasks] == ["finished"] * 2
    assert {request.seconds for request in requests} == {60.0}
