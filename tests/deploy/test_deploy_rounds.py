import pytest
import torch
from near import Near, described, devices_of, served, simulated

from pliant.deploy.letters import Answer, packed, read_answer
from pliant.deploy.post import Reply
from pliant.deploy.rounds import NotEnough
from pliant.engine.ledger import TaskRecord, check


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


def spoiled(change):
    """Return a meddler that changes the answers of device 1 by a function of head and tensors."""

    def meddle(device, round, raw):
        if device != 1:
            return raw
        head, groups = read_answer(raw)
        return packed(*change(head, groups))

    return meddle


def told(**claims):
    import msgspec

    return spoiled(lambda head, groups: (msgspec.structs.replace(head, **claims), groups))


def tensor(spoil):
    def change(head, groups):
        name = max(groups["change"], key=lambda key: groups["change"][key].numel())
        made = dict(groups["change"])
        made[name] = spoil(made[name].clone())
        return head, groups | {"change": made}

    return spoiled(change)


def number(value):
    def spoil(values):
        values.view(-1)[0] = value
        return values

    return tensor(spoil)


BAD = {
    "a NaN": number(float("nan")),
    "an infinity": number(float("inf")),
    "a huge number": number(1e30),
    "another shape": tensor(lambda values: values[:1].clone()),
    "one number that would broadcast": tensor(lambda values: torch.zeros(1)),
    "another type": tensor(lambda values: values.to(torch.float64)),
    "integers": tensor(lambda values: values.to(torch.int32)),
    "no tensors": spoiled(lambda head, groups: (head, {})),
    "one too many": spoiled(
        lambda head, groups: (head, {**groups, "change": {**groups["change"], "x": torch.ones(1)}})
    ),
    "another extra": spoiled(
        lambda head, groups: (head, {**groups, "extra": {"x": torch.ones(1)}})
    ),
    "masks of nothing": spoiled(
        lambda head, groups: (head, {**groups, "trained": {"masks": torch.zeros(1, 3)}})
    ),
    "too much compute": told(macs=1e12),
    "compute beyond numbers": told(macs=1e300),
    "no compute": told(macs=0.0),
    "negative compute": told(macs=-1.0),
    "too many samples": told(samples=10**9),
    "no samples": told(samples=0),
    "another's samples": told(owned=10**6),
    "another device": told(device=2),
    "another round": told(round=7),
    "steps that nobody asked for": told(rows=(0,) * 500, times=(0.0,) * 501),
    "rows that are not there": told(rows=(99,) * 5, times=(0.0,) * 6),
    "rows below zero": told(rows=(-1,) * 5, times=(0.0,) * 6),
    "times that go back": told(times=(3.0, 2.0, 1.0, 0.5, 0.25, 0.1)),
    "a time before the order": told(seconds=1e9),
    "fewer times than steps": told(times=(0.0,)),
    "nothing": lambda device, round, raw: b"" if device == 1 else raw,
    "noise": lambda device, round, raw: bytes(1000) if device == 1 else raw,
    "one bit": lambda device, round, raw: (
        raw[:-9] + bytes([raw[-9] ^ 1]) + raw[-8:] if device == 1 else raw
    ),
    "twenty megabytes": lambda device, round, raw: bytes(20_000_000) if device == 1 else raw,
}


@pytest.fixture(scope="module")
def devices(tmp_path_factory):
    """Build devices once: FedAvg leaves nothing in them."""
    return devices_of(described(rounds=1), tmp_path_factory.mktemp("devices"))


@pytest.fixture(scope="module")
def without(tmp_path_factory, devices):
    """Return the digest of the run to which device 1 gives nothing."""
    folder = tmp_path_factory.mktemp("without")
    experiment = described(rounds=1)

    def lost(device, round, raw):
        return Reply(1, None, "gone") if device == 1 else raw

    return served(experiment, Near(devices, lost), folder / "run")[-1].digest


@pytest.mark.parametrize("kind", BAD)
def test_an_update_that_is_bad_is_as_if_it_had_never_come(tmp_path, kind, without, devices):
    experiment = described(rounds=1)
    link = Near(devices, BAD[kind])
    records = served(experiment, link, tmp_path / "run")
    assert check(records) == 1
    assert tasks(records)[1].end.startswith("rejected: device 1: expected ")
    assert records[-1].digest == without


def test_a_device_that_says_nothing_ends_late_by_the_deadline(tmp_path):
    experiment = described(fleet={"round_seconds": 0.3}, rules={"late": "partial"}, rounds=1)

    def hanging(device, round, raw):
        return None if device == 1 else raw

    link = Near(devices_of(experiment, tmp_path), hanging)
    records = served(experiment, link, tmp_path / "run", allowance=3.0)
    assert check(records) == 1
    assert tasks(records)[1].end == "late"
    assert records[-1].seconds < 0.3 + 3.0 + 1.0


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


def test_a_run_without_devices_says_so(tmp_path):
    with pytest.raises(NotEnough, match="waited for 3 devices, 0 came"):
        served(described(), Near({}), tmp_path / "run", patience=0.1)


@pytest.mark.parametrize("when", [0, 1, 2])
def test_a_server_that_is_killed_goes_on_to_the_same_weights(tmp_path, when):
    experiment = described("scaffold", rounds=3)
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
    assert check(records) == 3
    assert records[-1].digest == whole[-1].digest


def test_surplus_updates_are_told_from_those_that_count(tmp_path):
    experiment = described(per_round=2, rules={"over": 0.5}, rounds=1)
    records = served(experiment, Near(devices_of(experiment, tmp_path)), tmp_path / "run")
    assert check(records) == 1
    assert records[-1].ends == {"finished": 2, "surplus": 1}


def test_what_a_device_says_of_its_failure_is_in_the_ledger(tmp_path):
    experiment = described(rounds=1)
    devices = devices_of(experiment, tmp_path)
    devices[2] = lambda letter: packed(Answer("declined", 2, 0, "it is not charging"))
    records = served(experiment, Near(devices), tmp_path / "run")
    assert tasks(records)[2].end == "dropped: declined, it is not charging"


@pytest.mark.parametrize("squeeze", ["fp16", "int8", "topk"])
def test_smaller_updates_are_smaller_and_still_merge(tmp_path, squeeze):
    experiment = described(rounds=2)
    plain = served(experiment, Near(devices_of(experiment, tmp_path / "a")), tmp_path / "plain")
    small = served(
        experiment,
        Near(devices_of(experiment, tmp_path / "b")),
        tmp_path / "small",
        squeeze={"type": squeeze},
    )
    assert check(small) == 2
    ratio = small[-1].up / plain[-1].up
    assert ratio < {"fp16": 0.55, "int8": 0.35, "topk": 0.35}[squeeze]
    assert small[-1].merged == 3
