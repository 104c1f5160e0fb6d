"""What a device that lies or is broken can send: each kind is refused by name."""

import time

import pytest
from bad_answers import BAD, told
from near import Near, described, devices_of, world_of

from pliant.deploy.desk import Desk, asks_of
from pliant.deploy.inbox import accept
from pliant.deploy.post import Reply
from pliant.deploy.service import Service
from pliant.engine.store import Saved
from pliant.methods.base import State
from pliant.methods.guard import Policy
from pliant.params import params_of


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


def test_there_are_forty_kinds_of_bad_answers():
    assert len(BAD) >= 40


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
