"""The devices of a deployment on the page: the same numbers as `pliant server status`."""

import asyncio
import json
import subprocess
import sys

import msgspec
import pytest
from tests.dashboard.written_runs import make_lines, make_task, make_writer, write_run

from pliant import cli
from pliant.dashboard import server
from pliant.dashboard.fleet_view import MAX_DEVICES, FleetViews, describe_fleet, is_news
from pliant.deploy.server.fleet_status import StatusReader
from pliant.deploy.server.presence import PRESENCE_FILE, STALE_SECONDS, Battery, PresenceWriter


@pytest.fixture
def run(tmp_path):
    """Return the folder of a deployment: two of three devices have trained, one is offline."""
    folder = write_run(tmp_path / "runs" / "live", 2, fleet={"size": 3})
    make_writer(folder).note_online({0, 1, 2})
    make_writer(folder).note_reply(1, Battery(0.63, is_charging=False))
    make_writer(folder).note_online({1, 2})
    return folder


def add_task(folder, **changes):
    task = msgspec.structs.replace(make_task(2, 0), samples=0, steps=0, useful=0.0, **changes)
    with open(folder / "events.jsonl", "ab") as file:
        file.write(msgspec.json.encode(task) + b"\n")


def test_the_page_gets_what_server_status_prints(run, capsys):
    add_task(run, outcome="rejected: device 0: expected a number")
    add_task(run, outcome="late", device=2)
    assert cli.main(["server", "status", str(run), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    message = json.loads(msgspec.json.encode(describe_fleet(FleetViews(run.parent).read("live"))))
    assert {key: message[key] for key in printed} | {"time": 0} == printed | {"time": 0}
    assert (message["merged"], message["late"], message["rejected"]) == (4, 1, 1)
    assert (message["online"], message["size"], message["known"]) == (2, 3, 3)
    first, second, _ = message["devices"]
    assert (first["online"], first["last_outcome"][:8]) == (False, "rejected")
    assert second["battery"] == {"charge": 0.63, "is_charging": False}
    assert (second["rows"], second["shares"]) == ([0, 3], [0.1, 1.0])
    assert second["speed"] == pytest.approx(400 / 0.8)  # of a task of four mini-batches


def test_nobody_is_online_once_the_server_has_not_looked_for_long(run):
    now = StatusReader(run).read().time
    after = StatusReader(run, lambda: now + 2 * STALE_SECONDS).read()
    assert (after.is_live, after.online) == (False, 0)
    assert after.devices[1].last_seen is not None


def test_other_runs_have_no_devices_to_show(run):
    write_run(run.parent / "simulated", 2)
    outside = run.parent.parent / "presence.json"
    outside.write_text((run / PRESENCE_FILE).read_text())
    write_run(run.parent / "linked", 2)
    (run.parent / "linked" / PRESENCE_FILE).symlink_to(outside)
    views = FleetViews(run.parent)
    assert views.read("simulated") is None
    assert views.read("linked") is None  # links are not followed


def test_a_large_fleet_is_shown_up_to_a_limit_and_counted_whole(run):
    PresenceWriter(run).note_online(range(MAX_DEVICES + 5))
    message = describe_fleet(FleetViews(run.parent).read("live"))
    assert len(message["devices"]) == MAX_DEVICES
    assert (message["known"], message["online"]) == (MAX_DEVICES + 5, MAX_DEVICES + 5)


def test_only_a_change_is_news(run):
    views = FleetViews(run.parent)
    first, second = views.read("live"), views.read("live")
    assert is_news(first, None)
    assert not is_news(second, first)
    PresenceWriter(run).note_online({0})
    assert is_news(views.read("live"), second)


def test_the_stream_sends_devices_when_they_change(run, monkeypatch):
    monkeypatch.setattr(server, "POLL_SECONDS", 0.0)

    async def collect():
        watcher, fleets = server.RunWatcher(run.parent), []
        async for raw in server._stream_events(watcher, ["live", "missing"], ""):
            kind, _, rest = raw.decode().partition("\n")
            if kind == "event: fleet":
                fleets.append(json.loads(rest.partition("data: ")[2]))
                if len(fleets) == 2:
                    return fleets
                with open(run / "events.jsonl", "ab") as file:
                    file.write(make_lines(2))

    first, second = asyncio.run(collect())
    assert (first["run"], first["rounds"], second["rounds"]) == ("live", 2, 3)


def test_reading_the_status_does_not_load_torch():
    code = "import sys, pliant.dashboard.fleet_view; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
