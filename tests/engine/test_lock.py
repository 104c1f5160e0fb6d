import os
import signal
import subprocess
import sys

import pytest

from pliant.engine.lock import Lock
from pliant.engine.store import Store

HOLD = """
import sys
from pathlib import Path
from pliant.engine.lock import Lock
lock = Lock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """A second process that holds the lock of a folder."""
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"held\n"
        yield process
        process.kill()


def test_a_second_process_is_refused_in_one_line_and_changes_nothing(holder, tmp_path):
    half = b'{"type":"round"'  # as the first process has it while it writes
    (tmp_path / "events.jsonl").write_bytes(half)
    with pytest.raises(BlockingIOError, match="expected no other process at this run") as error:
        Store(tmp_path)
    assert str(tmp_path) in str(error.value)
    assert f"found process {holder.pid};" in str(error.value)
    assert "\n" not in str(error.value)
    assert (tmp_path / "events.jsonl").read_bytes() == half


def test_the_lock_ends_with_its_holder(holder, tmp_path):
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    Store(tmp_path).close()


def test_a_closed_store_can_be_opened_again(tmp_path):
    for _ in range(2):
        Store(tmp_path).close()


def test_a_process_that_the_holder_starts_does_not_keep_the_lock(tmp_path):
    lock = Lock(tmp_path)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        lock.close()
        Lock(tmp_path).close()
    finally:
        child.kill()
        child.communicate()
