"""Every kind of bad reply is refused with a reason."""

import pytest
from tests.deploy.bad_replies import BAD_REPLIES, set_fields
from tests.deploy.in_process import (
    InProcessTransport,
    make_context,
    make_devices,
    make_experiment,
)

from pliant.deploy.server.presence import Battery
from pliant.deploy.server.replies import RawReply, check_reply
from pliant.deploy.server.rounds import DeviceTransport, make_run
from pliant.deploy.settings import ServerSettings


@pytest.fixture(scope="module")
def exchange(tmp_path_factory):
    """Return a run, its request to device 1, and the honest reply."""
    experiment = make_experiment()
    run = make_run(experiment, make_context(experiment))
    devices = make_devices(experiment, tmp_path_factory.mktemp("devices"))
    transport = DeviceTransport(experiment, ServerSettings(), InProcessTransport(devices))
    transport.prepare(run, [1])
    request = transport.requests[1]
    return run, request, devices[1].handle_request(bytes(request.raw))


def check(exchange, edit):
    run, request, raw = exchange
    return check_reply(run, request, RawReply(1, edit(raw)), 60.0)


def test_there_are_forty_kinds_of_bad_replies():
    assert len(BAD_REPLIES) >= 40


def test_an_honest_reply_is_accepted(exchange):
    reply = check(exchange, lambda raw: raw)
    assert reply.outcome == ""
    assert reply.update.steps == len(exchange[1].manifest.batch_sizes)


@pytest.mark.parametrize("kind", BAD_REPLIES)
def test_a_bad_reply_is_rejected_with_a_reason(exchange, kind):
    reply = check(exchange, BAD_REPLIES[kind])
    assert reply.update is None
    assert reply.outcome.startswith("rejected: device 1: expected ")
    assert len(reply.outcome) < 500


@pytest.mark.parametrize(
    ("fields", "battery"),
    [
        ({"charge": 0.5, "is_charging": True}, Battery(0.5, True)),
        ({"charge": 0.0}, Battery(0.0)),
        ({"charge": 1.01}, None),
        ({"charge": float("nan")}, None),
        ({"charge": -1e300}, None),
        ({}, None),
        ({"kind": "declined", "charge": 0.1}, Battery(0.1)),
    ],
)
def test_a_battery_is_noted_if_it_is_possible(exchange, fields, battery):
    assert check(exchange, set_fields(**fields)).battery == battery


@pytest.mark.parametrize("macs", [1e12, 1e300, float("nan"), float("inf"), -1.0, 0.0])
def test_no_update_counts_for_more_than_one_at_full_width(exchange, macs):
    assert check(exchange, set_fields(macs=macs)).update is None


def test_a_reply_is_bounded_by_the_stage_of_the_run(tmp_path):
    stages = [{"until": 0.5, "width": 0.5}, {}]
    experiment = make_experiment({"type": "progressive", "stages": stages})
    run = make_run(experiment, make_context(experiment))
    devices = make_devices(experiment, tmp_path)
    transport = DeviceTransport(experiment, ServerSettings(), InProcessTransport(devices))
    transport.prepare(run, [1])
    request = transport.requests[1]
    exchange = run, request, devices[1].handle_request(bytes(request.raw))
    honest = check(exchange, lambda raw: raw)
    assert (honest.outcome, set(honest.reply.rows)) == ("", {0})
    rows = (1,) * len(honest.reply.rows)
    assert "expected rows from 0 to 0, got 1" in check(exchange, set_fields(rows=rows)).outcome
    more = 1.01 * honest.update.macs
    assert "expected MACs above 0 and up to" in check(exchange, set_fields(macs=more)).outcome
