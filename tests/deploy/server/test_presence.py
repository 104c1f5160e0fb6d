from tests.waiting import wait_until

from pliant.deploy.server import presence
from pliant.deploy.server.presence import (
    PRESENCE_FILE,
    Battery,
    PresenceWriter,
    read_presence,
    watch_presence,
)


def test_devices_are_online_until_a_look_misses_them(tmp_path):
    now = [100.0]
    writer = PresenceWriter(tmp_path, lambda: now[0])
    writer.note_online({0, 2})
    now[0] = 101.0
    writer.note_reply(5)  # it came after the look
    assert read_presence(tmp_path).online == (0, 2, 5)
    now[0] = 110.0
    writer.note_online({2})
    presence = read_presence(tmp_path)
    assert presence.online == (2,)
    assert presence.last_seen == {0: 100.0, 2: 110.0, 5: 101.0}
    assert (tmp_path / PRESENCE_FILE).stat().st_mode & 0o777 == 0o600


def test_a_file_is_not_written_at_every_look(tmp_path):
    now = [100.0]
    writer = PresenceWriter(tmp_path, lambda: now[0])
    writer.note_online({1})
    now[0] = 100.5
    writer.note_online({1})
    assert read_presence(tmp_path).written_at == 100.0
    now[0] = 103.0
    writer.note_online({1})
    assert read_presence(tmp_path).written_at == 103.0


def test_devices_that_join_together_are_written_together(tmp_path, monkeypatch):
    now, online, writes = [100.0], set(), []
    write = presence.atomic.write_bytes
    monkeypatch.setattr(
        presence.atomic, "write_bytes", lambda *a, **k: (writes.append(now[0]), write(*a, **k))
    )
    writer = PresenceWriter(tmp_path, lambda: now[0])
    for device in range(1000):
        now[0] += 0.001
        online.add(device)
        writer.note_online(online)
    assert len(writes) <= 3
    now[0] += 0.5
    writer.note_online(online)  # the next look
    assert read_presence(tmp_path).online == tuple(range(1000))
    writer.note_online(())  # the end is written at once
    assert read_presence(tmp_path).online == ()


def test_a_restarted_server_remembers_when_devices_were_seen(tmp_path):
    PresenceWriter(tmp_path, lambda: 100.0).note_online({0, 1})
    PresenceWriter(tmp_path, lambda: 200.0).note_online({1})
    assert read_presence(tmp_path).last_seen == {0: 100.0, 1: 200.0}


def test_a_damaged_or_missing_file_says_nothing(tmp_path):
    assert read_presence(tmp_path).online == ()
    (tmp_path / PRESENCE_FILE).write_text("{")
    assert read_presence(tmp_path).online == ()


def test_a_disk_that_cannot_be_written_does_not_end_a_round(tmp_path):
    writer = PresenceWriter(tmp_path)
    (tmp_path / PRESENCE_FILE).mkdir()  # nothing can replace it
    writer.note_online({1})
    assert list((tmp_path / PRESENCE_FILE).iterdir()) == []


def test_a_new_battery_state_is_written_soon_and_remembered(tmp_path):
    now = [100.0]
    writer = PresenceWriter(tmp_path, lambda: now[0])
    writer.note_online({1})
    writer.note_reply(1, Battery(0.5))
    now[0] += 0.5
    writer.note_reply(1)  # a reply without one
    assert read_presence(tmp_path).batteries == {1: Battery(0.5)}
    PresenceWriter(tmp_path, lambda: 200.0).note_online({1})
    assert read_presence(tmp_path).batteries == {1: Battery(0.5)}


def test_who_is_online_is_watched_until_the_end(tmp_path):
    online = {0, 1}
    with watch_presence(tmp_path, lambda: online):
        wait_until(lambda: read_presence(tmp_path).online == (0, 1), "both devices online")
    presence = read_presence(tmp_path)
    assert (presence.online, set(presence.last_seen)) == ((), {0, 1})
