"""The file that shows that a process is alive."""

import os

from pliant.deploy.device.heartbeat import MAX_STEP_SECONDS, Heartbeat


def test_only_a_step_without_an_end_stops_the_heartbeat(tmp_path):
    now, path = [0.0], tmp_path / "heartbeat"
    heartbeat = Heartbeat(path, clock=lambda: now[0])

    def is_touched():
        path.touch()
        os.utime(path, (1, 1))
        heartbeat.touch()
        return path.stat().st_mtime > 1

    now[0] += 2 * MAX_STEP_SECONDS
    assert is_touched()  # it waits
    with heartbeat.working():
        for _ in range(3):
            now[0] += 0.9 * MAX_STEP_SECONDS
            assert is_touched()
            heartbeat.note_progress()
        now[0] += MAX_STEP_SECONDS
        assert not is_touched()
    assert is_touched()
