"""The restart policy, with processes that end when the test says so and a clock that it sets."""

import os

import pytest

from pliant.deploy.supervise.child_process import run_supervisor
from pliant.deploy.supervise.supervisor import (
    HANG_SECONDS,
    MAX_DEATHS,
    Reaction,
    Service,
    Supervisor,
)


class FakeProcess:
    def __init__(self):
        self.exit_code, self.pid = None, 1

    @property
    def is_alive(self):
        return self.exit_code is None

    def stop(self):
        self.exit_code = -15


class Machine:
    """Start fake processes and note when; kill them; move the clock."""

    def __init__(self, folder, names="a", **options):
        self.now, self.starts, self.processes = 0.0, [], {}

        def make_service(name):
            def start():
                self.starts.append((name, self.now))
                self.processes[name] = FakeProcess()
                return self.processes[name]

            log, clock = folder / f"{name}.log", lambda: self.now
            return Service(name, f"process {name}", start, log, clock=clock, **options)

        self.supervisor = Supervisor(folder, "lock", [make_service(name) for name in names])

    def run(self, seconds):
        """Check ten times a second."""
        for _ in range(round(10 * seconds)):
            self.now = round(self.now + 0.1, 1)
            self.supervisor.check()

    def kill(self, name="a", exit_code=-9):
        self.processes[name].exit_code = exit_code


def test_the_delay_doubles_and_starts_over_after_a_long_life(tmp_path, caplog):
    machine = Machine(tmp_path)
    with run_supervisor(machine.supervisor):
        delays = []
        for life in (1, 1, 1, 31, 1):
            machine.run(life)
            machine.kill()
            died_at, count = machine.now, len(machine.starts)
            while len(machine.starts) == count:
                machine.run(0.1)
            delays.append(round(machine.starts[-1][1] - died_at - 0.1, 1))  # seen at the next check
    assert delays == [0.2, 0.4, 0.8, 0.2, 0.4]
    assert caplog.messages == ["process a died; restarting it"] * 5
    assert machine.supervisor.pids == {}


def test_ten_deaths_without_progress_are_the_end(tmp_path):
    rounds = [0]
    machine = Machine(tmp_path, progress=lambda: rounds[0])

    def die(times):
        for _ in range(times):
            machine.run(60)  # a long life is no progress
            machine.kill()
            machine.run(1)

    with run_supervisor(machine.supervisor):
        die(MAX_DEATHS - 1)
        rounds[0] += 1
        die(MAX_DEATHS - 1)
        with pytest.raises(ChildProcessError, match="process a died 10 times without progress"):
            die(1)


def test_nothing_is_restarted_before_what_it_depends_on(tmp_path):
    machine = Machine(tmp_path, "ab")
    with run_supervisor(machine.supervisor):
        for _ in range(3):
            machine.kill("a")
            machine.run(2)
        machine.kill("a")
        machine.kill("b")
        machine.run(5)
    assert [name for name, _ in machine.starts] == ["a", "b", "a", "a", "a", "a", "b"]


def test_a_process_that_is_not_needed_waits_and_a_refused_one_is_retried_silently(tmp_path, caplog):
    reactions = [Reaction.WAIT] * 20 + [Reaction.RETRY]
    machine = Machine(tmp_path, react=lambda exit_code: reactions.pop(0))
    with run_supervisor(machine.supervisor):
        machine.kill(exit_code=0)
        machine.run(1.9)
        assert len(machine.starts) == 1
        machine.run(1)
        assert len(machine.starts) == 2
    assert caplog.messages == []


def test_a_process_without_a_heartbeat_is_killed_and_restarted(tmp_path, caplog):
    beat = tmp_path / "heartbeat"
    machine = Machine(tmp_path, heartbeat=beat)
    with run_supervisor(machine.supervisor):
        machine.run(2 * HANG_SECONDS)  # it is still starting
        for number in range(10):
            beat.touch()
            os.utime(beat, ns=(number, number))  # a clock that is wrong does not matter
            machine.run(HANG_SECONDS / 2)
        assert len(machine.starts) == 1
        machine.run(HANG_SECONDS)
        assert len(machine.starts) == 2
    assert caplog.messages == ["process a hangs; killing it", "process a died; restarting it"]
