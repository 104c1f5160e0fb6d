import os
import signal
import subprocess
import sys

import pytest

from pliant.engine.run_store import RunStore
from pliant.storage.run_lock import RunLock

HOLD = """
import sys
from pathlib import Path
from pliant.storage.run_lock import RunLock
lock = RunLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Start a second process that holds the lock of a folder."""
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"held\n"
        yield process
        process.kill()


def test_a_second_process_is_refused_in_one_line_and_changes_nothing(holder, tmp_path):
    partial = b'{"type":"round"'  # the owner is writing a record
    (tmp_path / "events.jsonl").write_bytes(partial)
    with pytest.raises(BlockingIOError, match=f"in use by process {holder.pid};") as error:
        RunStore(tmp_path)
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)
    assert (tmp_path / "events.jsonl").read_bytes() == partial


def test_the_lock_ends_with_its_owner(holder, tmp_path):
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    RunStore(tmp_path).close()


def test_a_closed_store_can_be_opened_again(tmp_path):
    for _ in range(2):
        RunStore(tmp_path).close()


def test_a_child_process_does_not_keep_the_lock(tmp_path):
    lock = RunLock(tmp_path)
    command = [sys.executable, "-c", "print('started', flush=True); input()"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    child = subprocess.Popen(command, **pipes, close_fds=False)
    try:
        assert child.stdout.readline() == b"started\n"  # files close as a program starts
        lock.release()
        RunLock(tmp_path).release()
    finally:
        child.kill()
        child.communicate()
