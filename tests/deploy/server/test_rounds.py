from itertools import count
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from tests.deploy.in_process import (
    InProcessTransport,
    compute_simulated_digest,
    make_context,
    make_devices,
    make_experiment,
    serve_rounds,
)

from pliant.deploy.device.host import Limits
from pliant.deploy.messages import TrainReply, TrainRequest, decode_message, encode_message
from pliant.deploy.server.replies import RawReply
from pliant.deploy.server.rounds import NotEnoughDevices
from pliant.deploy.step_times import StoredCurve, measure_rows
from pliant.engine.ledger import TaskRecord, verify_records
from pliant.engine.run_store import read_records
from pliant.nn.pareto_table import ParetoTable, count_step_macs
from pliant.storage.formats import STEP_TIME_CURVE
from pliant.value import encode


def select_tasks(records):
    return [record for record in records if isinstance(record, TaskRecord)]


HALF = {"speed": {"type": "constant", "low": 0.5}}
CHANGING = {"speed": {"type": "changing", "low": 0.3, "high": 1.0, "per_round": 2.0}}


@pytest.mark.parametrize(
    ("method", "fleet", "late"),
    [
        ("fedavg", {}, "discard"),
        ("scaffold", {}, "discard"),  # the state of a device stays on it
        ("distreal", HALF, "partial"),
        ("heterofl", HALF, "discard"),  # packed updates
        ("elfish", HALF, "discard"),  # the device chooses filters itself
        ("coherent", CHANGING, "partial"),
        ("elastic_batch", CHANGING, "discard"),
        ("small", HALF, "partial"),
    ],
)
def test_simulated_pacing_ends_with_the_simulated_weights(tmp_path, method, fleet, late):
    # devices assume that every round lasts its length
    experiment = make_experiment(method, fleet=fleet, rules={"late": late, "grace": 0.0})
    transport = InProcessTransport(make_devices(experiment, tmp_path))
    records = serve_rounds(experiment, transport, tmp_path / "run", pace="simulated")
    assert verify_records(records) == 2
    assert records[-1].digest == compute_simulated_digest(experiment)


ROUNDED = {"type": "distreal", "choice": "rounded", "local": {"batch": 16}}


@pytest.mark.parametrize(("method", "trains"), [("fedavg", 0), ("heterofl", 1), (ROUNDED, 1)])
def test_simulated_pacing_has_the_memory_limits_of_the_simulation(tmp_path, method, trains):
    # a step of the full network on 16 images needs 4 · (58106 · 2 + 10698 · 16) bytes
    classes = [{"memory": 0.7 * 4 * (58106 * 2 + 10698 * 16)}, {}]
    experiment = make_experiment(
        method, fleet={"classes": classes}, rules={"grace": 0.0}, network={}
    )
    is_limited = experiment.fleet.get_class_indices(np.arange(3)) == 0
    assert 0 < sum(is_limited) < 3
    transport = InProcessTransport(make_devices(experiment, tmp_path))
    records = serve_rounds(experiment, transport, tmp_path / "run", pace="simulated")
    assert records[-1].digest == compute_simulated_digest(experiment)
    declined = "dropped: declined, no row fits in memory"
    for task in select_tasks(records):
        is_declined = not trains and is_limited[task.device]
        assert task.outcome == (declined if is_declined else "finished")


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "distreal", "heterofl"])
def test_devices_compress_updates_as_the_simulation_does(tmp_path, method):
    compression, rules = {"type": "topk", "share": 0.2}, {"late": "partial"}
    experiment = make_experiment(method, fleet=HALF, rules=rules, rounds=3, compression=compression)
    transport = InProcessTransport(make_devices(experiment, tmp_path))
    records = serve_rounds(experiment, transport, tmp_path / "run", pace="simulated")
    assert records[-1].digest == compute_simulated_digest(experiment)


CODE = Path(__file__).parents[1]
RESNET = {"name": f"{CODE / 'small_resnet.py'}:make_network"}


def make_resnet_devices(experiment, folder):
    return make_devices(experiment, folder, Limits(code=str(CODE)))


@pytest.mark.parametrize(("late", "adapts"), [("partial", True), ("discard", False)])
def test_devices_follow_the_stages_of_the_simulation(tmp_path, late, adapts):
    method = {
        "type": "progressive",
        "stages": [{"until": 0.5, "side": 9, "frozen": 1}, {"width": 0.6, "side": 20}],
        "local": {"batch": 16, "epochs": 4},
        "adapts": adapts,
    }
    rules = {"late": late, "grace": 0.0}
    experiment = make_experiment(method, fleet=CHANGING, network=RESNET, rules=rules)
    transport = InProcessTransport(make_resnet_devices(experiment, tmp_path))
    records = serve_rounds(experiment, transport, tmp_path / "run", pace="simulated")
    tasks = select_tasks(records)
    assert {row for task in tasks if task.round == 0 for row in task.rows} == {0}
    assert 1 in {row for task in tasks if task.round == 1 for row in task.rows}
    assert records[-1].digest == compute_simulated_digest(experiment)


def make_compound_table():
    """Return a table of three smaller steps and the full one."""
    net = make_context(make_experiment("distreal", network=RESNET)).net
    rows = ((0.5, 14, 0.5), (0.0, 14, 1.0), (0.0, 20, 1.0), (0.0, None, 1.0))
    full = net.macs(0.0, training=True)
    shares = [count_step_macs(net, rate, *scale) / full for rate, *scale in rows]
    rates, sides, batch_shares = zip(*rows, strict=True)
    vectors = tuple((rate,) * len(net.sites) for rate in rates)
    columns = {"sides": sides, "batch_shares": batch_shares}
    return ParetoTable(net.fingerprint, vectors, tuple(shares), **columns)


@pytest.mark.parametrize("options", [{"type": "distreal"}, {"type": "coherent"}])
def test_devices_use_a_table_of_sides_as_the_simulation_does(tmp_path, options):
    method = options | {"local": {"batch": 16}, "table": encode(make_compound_table())}
    experiment = make_experiment(method, fleet=CHANGING, network=RESNET, rules={"grace": 0.0})
    transport = InProcessTransport(make_resnet_devices(experiment, tmp_path))
    records = serve_rounds(experiment, transport, tmp_path / "run", pace="simulated")
    assert len({row for task in select_tasks(records) for row in task.rows}) > 1
    assert records[-1].digest == compute_simulated_digest(experiment)


@pytest.mark.parametrize("adapts", [True, False])
def test_every_row_of_a_table_with_sides_is_timed(adapts):
    table = make_compound_table()
    method = {"type": "distreal", "adapts": adapts, "table": encode(table)}
    context = make_context(make_experiment(method, network=RESNET))
    x, y, ticks = torch.rand(8, 1, 28, 28), torch.zeros(8).long(), count()
    curve = measure_rows(context, x, y, clock=lambda: next(ticks))
    assert curve.shares.tolist() == list(table.shares)


def test_devices_freeze_layers_as_the_simulation_does(tmp_path):
    stages = [{"until": 0.5}, {"frozen": 3}]
    method = {"type": "progressive", "stages": stages, "local": {"batch": 16, "epochs": 4}}
    rules = {"late": "partial", "grace": 0.0}
    experiment = make_experiment(method, fleet=CHANGING, network=RESNET, rules=rules)
    transport = InProcessTransport(make_resnet_devices(experiment, tmp_path))
    records = serve_rounds(experiment, transport, tmp_path / "run", pace="simulated")
    assert {row for task in select_tasks(records) for row in task.rows} == {0, 1}
    assert records[-1].digest == compute_simulated_digest(experiment)
    context = make_context(experiment)
    x, y, ticks = torch.rand(8, 1, 28, 28), torch.zeros(8).long(), count()
    curve = measure_rows(context, x, y, clock=lambda: next(ticks))
    assert curve.shares.tolist() == sorted(context.budget_policy.rows.shares)
    assert curve.shares[0] < curve.shares[1] == context.find_max_share(1) == 1.0


def test_devices_augment_images_as_the_simulation_does(tmp_path):
    local = {"batch": 16, "augment": {"type": "crop_flip", "pad": 2}}
    experiment = make_experiment(method={"type": "fedavg", "local": local})
    transport = InProcessTransport(make_devices(experiment, tmp_path))
    records = serve_rounds(experiment, transport, tmp_path / "run", pace="simulated")
    assert records[-1].digest == compute_simulated_digest(experiment)
    assert records[-1].digest != compute_simulated_digest(make_experiment())


def test_the_mean_over_the_rounds_is_that_of_the_simulation(tmp_path):
    experiment = make_experiment(rounds=3, ema_decay=0.9)
    transport = InProcessTransport(make_devices(experiment, tmp_path))
    records = serve_rounds(experiment, transport, tmp_path / "run", pace="simulated")
    assert records[-1].digest == compute_simulated_digest(experiment)
    assert records[-1].digest != compute_simulated_digest(make_experiment(rounds=3))


def test_a_measured_run_with_enough_time_equals_the_simulated_one(tmp_path):
    experiment = make_experiment("distreal")
    records = serve_rounds(
        experiment, InProcessTransport(make_devices(experiment, tmp_path)), tmp_path / "run"
    )
    assert verify_records(records) == 2
    assert records[-1].digest == compute_simulated_digest(experiment)
    assert all(task.up > 0 and task.down > task.up / 2 for task in select_tasks(records))


def test_a_device_saves_its_refined_step_times(tmp_path):
    experiment = make_experiment("distreal")
    hello = encode_message(TrainRequest("hello", encode(experiment), -1))

    def say_hello():
        return decode_message(
            make_devices(experiment, tmp_path)[0].handle_request(hello), TrainReply
        )[0].curve

    say_hello()
    [path] = (tmp_path / "device0").glob("curve-*.json")
    first = path.read_bytes()  # the reply is scaled by the load of the machine
    say_hello()
    assert path.read_bytes() == first  # measured once
    serve_rounds(
        experiment, InProcessTransport(make_devices(experiment, tmp_path)), tmp_path / "run"
    )
    later = path.read_bytes()
    assert later != first
    before, after = (msgspec.json.decode(raw, type=StoredCurve).points for raw in (first, later))
    assert [share for share, _ in after] == [share for share, _ in before]
    stored = StoredCurve(STEP_TIME_CURVE.number, ((1.0, -1.0),))
    path.write_bytes(msgspec.json.encode(stored))  # implausible: measured again
    assert all(seconds > 0 for _, seconds in say_hello())


def test_a_bad_reply_changes_nothing_and_is_named(tmp_path):
    experiment = make_experiment()

    def truncate(device, round, raw):
        return raw[:-1] if device == 1 else raw

    def lose(device, round, raw):
        return RawReply(1, None, "gone") if device == 1 else raw

    records = [
        serve_rounds(
            experiment,
            InProcessTransport(make_devices(experiment, tmp_path), tamper),
            tmp_path / name,
        )
        for name, tamper in (("bad", truncate), ("lost", lose))
    ]
    bad, lost = records
    assert verify_records(bad) == verify_records(lost) == 2
    assert bad[-1].digest == lost[-1].digest
    assert select_tasks(bad)[1].outcome.startswith("rejected: device 1: expected an intact message")
    assert select_tasks(lost)[1].outcome == "dropped: gone"


class Clock:
    """A clock that advances only by sleeping."""

    now = 0.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def test_even_a_round_that_waits_for_all_ends_after_twenty_lengths(tmp_path):
    experiment, clock = make_experiment(rounds=1, rules={"late": "wait"}), Clock()

    def hang(device, round, raw):
        clock.now += 10.0
        return None if device == 2 else raw

    transport = InProcessTransport(make_devices(experiment, tmp_path), hang)
    options = {"clock": clock, "sleep": clock.sleep, "allowance": 15.0}
    records = serve_rounds(experiment, transport, tmp_path / "run", **options)
    assert [task.outcome for task in select_tasks(records)] == ["finished", "finished", "late"]
    assert records[-1].seconds == pytest.approx(20 * 60.0 + 15.0, abs=0.5)


def test_a_silent_device_ends_late_at_the_deadline(tmp_path):
    experiment, clock = make_experiment(rounds=1), Clock()

    def hang(device, round, raw):
        clock.now += 50.0 / 3
        return None if device == 1 else raw

    records = serve_rounds(
        experiment,
        InProcessTransport(make_devices(experiment, tmp_path), hang),
        tmp_path / "run",
        clock=clock,
        sleep=clock.sleep,
        allowance=3.0,
    )
    assert verify_records(records) == 1
    assert [task.outcome for task in select_tasks(records)] == ["finished", "late", "finished"]
    closes_at = 60.0 * (1 + experiment.rules.grace) + 3.0
    assert closes_at <= records[-1].seconds <= closes_at + 0.25


def test_a_round_without_updates_is_repeated_from_the_same_model(tmp_path):
    experiment = make_experiment(rounds=1, rules={"quorum": 1.0})

    def fail_once(device, round, raw):
        return RawReply(device, None, "gone") if round == 0 and device == 0 else raw

    transport = InProcessTransport(make_devices(experiment, tmp_path), fail_once)
    records = serve_rounds(experiment, transport, tmp_path / "run")
    assert verify_records(records) == 2
    assert [task.outcome for task in select_tasks(records)][:3] == ["dropped: gone", "void", "void"]
    assert records[-1].merged == 3


def test_a_run_that_never_gets_an_update_ends(tmp_path):
    experiment = make_experiment(rounds=1)

    def lose(device, round, raw):
        return RawReply(device, None, "gone")

    transport = InProcessTransport(make_devices(experiment, tmp_path), lose)
    with pytest.raises(NotEnoughDevices, match="no update was merged in 3 consecutive rounds"):
        serve_rounds(experiment, transport, tmp_path / "run", retries=2)
    assert verify_records(read_records(tmp_path / "run")) == 3  # including the last of them


def test_consecutive_empty_rounds_are_counted_across_restarts(tmp_path):
    experiment = make_experiment(rounds=1)
    requests = []

    class Killed(BaseException):
        pass

    def lose(device, round, raw):
        requests.append((device, round))
        if round == 2 and len(requests) == 7:
            raise Killed
        return RawReply(device, None, "gone")

    devices = make_devices(experiment, tmp_path)
    with pytest.raises(Killed):
        serve_rounds(experiment, InProcessTransport(devices, lose), tmp_path / "run", retries=3)
    with pytest.raises(NotEnoughDevices, match="no update was merged in 4 consecutive rounds"):
        serve_rounds(experiment, InProcessTransport(devices, lose), tmp_path / "run", retries=3)
    assert (
        serve_rounds(experiment, InProcessTransport(devices), tmp_path / "run", retries=3)[
            -1
        ].merged
        == 3
    )


def test_a_run_without_devices_fails(tmp_path):
    with pytest.raises(NotEnoughDevices, match="expected 1 or more devices online, got 0"):
        serve_rounds(make_experiment(), InProcessTransport({}), tmp_path / "run", patience=0.1)


@pytest.mark.parametrize("when", [0, 1])
def test_a_killed_server_resumes_to_the_same_weights(tmp_path, when):
    experiment = make_experiment("scaffold", rounds=2)
    undisturbed = serve_rounds(
        experiment,
        InProcessTransport(make_devices(experiment, tmp_path / "a")),
        tmp_path / "undisturbed",
    )

    class Killed(BaseException):
        pass

    def kill(device, round, raw):
        if round == when and device == 1:
            raise Killed
        return raw

    devices = make_devices(experiment, tmp_path / "b")
    with pytest.raises(Killed):
        serve_rounds(experiment, InProcessTransport(devices, kill), tmp_path / "run")
    restarted = make_devices(experiment, tmp_path / "b")  # devices restart, too
    records = serve_rounds(experiment, InProcessTransport(restarted), tmp_path / "run")
    assert verify_records(records) == 2
    assert records[-1].digest == undisturbed[-1].digest


def test_surplus_updates_are_not_merged(tmp_path):
    experiment = make_experiment(per_round=2, rules={"over_selection": 0.5}, rounds=1)
    records = serve_rounds(
        experiment, InProcessTransport(make_devices(experiment, tmp_path)), tmp_path / "run"
    )
    assert verify_records(records) == 1
    assert records[-1].outcomes == {"finished": 2, "surplus": 1}


def test_an_unfinished_update_does_not_close_a_round_early(tmp_path):
    rules = {"late": "discard", "close_early": True, "over_selection": 0.5, "quorum": 1.0}
    experiment = make_experiment(rounds=1, per_round=2, rules=rules)

    def shorten(device, round, raw):
        reply, tensors = decode_message(raw, TrainReply)
        rows = reply.rows[:-1] if device == 0 else reply.rows
        times, samples = (0.0,) * (len(rows) + 1), 16 * len(rows) if device == 0 else reply.samples
        fields = {"rows": rows, "times": times, "seconds": 0.0, "samples": samples}
        return encode_message(msgspec.structs.replace(reply, **fields), tensors)

    transport = InProcessTransport(make_devices(experiment, tmp_path), shorten)
    records = serve_rounds(experiment, transport, tmp_path / "run")
    assert verify_records(records) == 1
    assert [task.outcome for task in select_tasks(records)][1:] == ["finished", "finished"]
    assert records[-1].merged == 2


def test_a_device_s_reason_for_declining_is_in_the_ledger(tmp_path):
    experiment = make_experiment(rounds=1)
    devices = make_devices(experiment, tmp_path)

    def decline(request):
        nonce = decode_message(request, TrainRequest)[0].nonce
        return encode_message(TrainReply("declined", 2, 0, "it is not charging", nonce=nonce))

    devices[2] = decline
    records = serve_rounds(experiment, InProcessTransport(devices), tmp_path / "run")
    assert select_tasks(records)[2].outcome == "dropped: declined, it is not charging"


def test_compressed_updates_are_smaller_and_still_merge(tmp_path):
    sizes = {}
    for kind in ("plain", "fp16", "int8", "topk"):
        experiment = make_experiment(rounds=1, compression={"type": kind})
        transport = InProcessTransport(make_devices(experiment, tmp_path / kind))
        records = serve_rounds(experiment, transport, tmp_path / kind / "run")
        assert verify_records(records) == 1
        assert records[-1].merged == 3
        sizes[kind] = records[-1].up
    assert sizes["fp16"] < 0.55 * sizes["plain"]
    assert sizes["int8"] < 0.35 * sizes["plain"]
    assert sizes["topk"] < 0.35 * sizes["plain"]


class OfflineDeviceTransport(InProcessTransport):
    """A transport to devices, of which number 2 is offline from a certain round on."""

    def __init__(self, devices, *, since, clock):
        super().__init__(devices)
        self.since, self.clock, self.rounds, self.sent = since, clock, 0, []

    def find_online_devices(self):
        return set(self.devices) - ({2} if self.rounds >= self.since else set())

    def send(self, requests, *, round, seconds):
        self.rounds += 1
        self.sent.append((self.clock.now, sorted(requests)))
        super().send(requests, round=round, seconds=seconds)


def serve_with_device_offline(tmp_path, since, rules=None):
    """Return when each round was sent, and to which devices."""
    experiment, clock = make_experiment(rounds=3, rules=rules or {}), Clock()
    devices = make_devices(experiment, tmp_path)
    transport = OfflineDeviceTransport(devices, since=since, clock=clock)
    options = {"clock": clock, "sleep": clock.sleep, "allowance": 15.0, "patience": 120.0}
    records = serve_rounds(experiment, transport, tmp_path / "run", **options)
    assert verify_records(records) == 3
    return transport.sent


def test_rounds_wait_for_an_offline_device_no_longer_than_the_allowance(tmp_path):
    first, *later = serve_with_device_offline(tmp_path, since=1)
    assert first == (0.0, [0, 1, 2])
    assert [devices for _, devices in later] == [[0, 1], [0, 1]]
    assert [time for time, _ in later] == pytest.approx([15.25, 30.5], abs=1.0)


def test_the_first_round_waits_longer(tmp_path):
    (time, devices), *_ = serve_with_device_offline(tmp_path, since=0)
    assert devices == [0, 1]
    assert time == pytest.approx(120.25, abs=1.0)


def test_a_round_does_not_start_below_its_quorum(tmp_path):
    with pytest.raises(NotEnoughDevices, match="expected 3 or more devices online, got 2"):
        serve_with_device_offline(tmp_path, since=1, rules={"quorum": 1.0})


def test_devices_are_charged_for_waiting_from_their_reply_to_the_close(tmp_path):
    experiment = make_experiment(fleet={"classes": [{"idle_watts": 2.0}]}, rounds=1)
    devices, now = make_devices(experiment, tmp_path), [0.0]

    def make_slow(agent):
        def reply(request):
            now[0] += 5.0  # the three replies arrive 5, 10 and 15 s after the requests
            return agent.handle_request(request)

        return reply

    transport = InProcessTransport({n: make_slow(agent) for n, agent in devices.items()})
    records = serve_rounds(experiment, transport, tmp_path / "run", clock=lambda: now[0])
    assert [task.joules for task in select_tasks(records)] == [20.0, 10.0, 0.0]


def test_private_rounds_equal_the_simulation_in_a_rehearsal_and_hide_their_noise_else(tmp_path):
    pytest.importorskip("dp_accounting")
    method = {"type": "fedavg", "weighting": "equal", "local": {"batch": 16}}
    privacy = {"clip": 0.5, "noise": 1.0}
    experiment = make_experiment(method, privacy=privacy, rules={"grace": 0.0})
    simulated = compute_simulated_digest(experiment)
    for name, pace in (("rehearsal", "simulated"), ("real", "measured"), ("again", "measured")):
        transport = InProcessTransport(make_devices(experiment, tmp_path / name))
        records = serve_rounds(experiment, transport, tmp_path / name / "run", pace=pace)
        assert (records[-1].digest == simulated) == (pace == "simulated")
        assert records[-1].epsilon > 0
    seeds = [tmp_path / name / "run" / "privacy.seed" for name in ("rehearsal", "real", "again")]
    assert [seed.exists() for seed in seeds] == [False, True, True]
    assert seeds[1].read_bytes() != seeds[2].read_bytes()
    assert seeds[1].stat().st_mode & 0o777 == 0o600


def test_privacy_hides_who_is_drawn_from_those_who_know_the_experiment(tmp_path):
    method = {"type": "fedavg", "weighting": "equal", "local": {"batch": 16}}
    experiment = make_experiment(
        method, privacy={"clip": 0.5, "noise": 0.0}, rounds=12, per_round=1, rules={"grace": 0.0}
    )
    drawn = {}
    for pace in ("simulated", "measured"):
        transport = InProcessTransport(make_devices(experiment, tmp_path / pace))
        records = serve_rounds(experiment, transport, tmp_path / pace / "run", pace=pace)
        drawn[pace] = [task.device for task in select_tasks(records)]
    assert drawn["simulated"] != drawn["measured"]  # alike with a chance of 3 ** -12
