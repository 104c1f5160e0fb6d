"""What a device that lies or is broken can send: each kind is refused by name."""

import time

import msgspec
import pytest
import torch
from near import Near, described, devices_of, world_of

from pliant.deploy.desk import Desk, asks_of
from pliant.deploy.inbox import accept
from pliant.deploy.letters import packed, read_answer
from pliant.deploy.post import Reply
from pliant.deploy.service import Service
from pliant.engine.store import Saved
from pliant.methods.base import State
from pliant.methods.guard import Policy
from pliant.params import params_of


def spoiled(change):
    """Return what makes bytes of bytes by a function of their head and tensors."""
    return lambda raw: packed(*change(*read_answer(raw)))


def told(**claims):
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
    "nothing": lambda raw: b"",
    "noise": lambda raw: bytes(1000),
    "one bit": lambda raw: raw[:-9] + bytes([raw[-9] ^ 1]) + raw[-8:],
    "twenty megabytes": lambda raw: bytes(20_000_000),
}


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """Return a world, what device 1 was asked, and its honest answer."""
    experiment = described()
    world = world_of(experiment)
    saved = Saved(0, 0.0, State(params_of(world.net.net)), {})
    devices = devices_of(experiment, tmp_path_factory.mktemp("devices"))
    desk = Desk(experiment, world, Near(devices), Service(), saved, time.monotonic, time.sleep)
    ask = asks_of(desk, 0, [1])[1]
    return world, ask, devices[1].answer(ask.letter)


def test_an_honest_answer_is_taken(asked):
    world, ask, raw = asked
    got = accept(world, Reply(1, raw), ask, Policy(), 60.0)
    assert got.end == ""
    assert got.update.steps == len(ask.work.sizes)


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_answer_gives_no_update_and_is_named(asked, kind):
    world, ask, raw = asked
    got = accept(world, Reply(1, BAD[kind](raw)), ask, Policy(), 60.0)
    assert got.update is None
    assert got.end.startswith("rejected: device 1: expected ")
    assert len(got.end) < 500


@pytest.mark.parametrize("macs", [1e12, 1e300, float("nan"), float("inf"), -1.0, 0.0])
def test_nobody_counts_for_more_than_a_device_at_full_rate(asked, macs):
    world, ask, raw = asked
    got = accept(world, Reply(1, told(macs=macs)(raw)), ask, Policy(), 60.0)
    assert got.update is None
