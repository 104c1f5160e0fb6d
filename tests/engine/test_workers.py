import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import psutil
import pytest
import torch
import worker_jobs
from worker_jobs import Train, act, nothing, rounds, train, world

from pliant.engine import processes, workers
from pliant.engine.segment import memory_folder
from pliant.engine.workers import AnyWorkers, Cluster, Inline, Processes, WorkerLost, opened
from pliant.value import decode, encode

JOBS = [Train(device, steps=1 + device % 3) for device in range(6)]
PARAMS = {"weight": torch.arange(6.0).reshape(2, 3), "count": torch.tensor(4)}


@pytest.fixture(scope="module")
def folder():
    """Return a folder in memory that no other test run writes to."""
    with TemporaryDirectory(prefix="pliant-test-", dir=memory_folder()) as name:
        yield Path(name)


@pytest.fixture(scope="module", autouse=True)
def workers_use_it(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "memory_folder", lambda: folder)
        yield


@pytest.fixture(autouse=True)
def nothing_is_left_behind(folder):
    before = left(folder)
    yield
    gc.collect()
    assert left(folder) == before


def left(folder):
    """Return the folders of pools, and how many processes they have."""
    alive = [child for child in psutil.Process().children() if "spawn_main" in _line(child)]
    return set(folder.iterdir()), len(alive)


def _line(process):
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@pytest.fixture(scope="module")
def expected():
    with opened(Inline(), world, train) as pool:
        return rounds(pool, JOBS)


@pytest.fixture(scope="module")
def pool(workers_use_it):
    with opened(Processes(count=2), nothing, act) as found:
        yield found


def test_workers_are_read_from_plain_data():
    for raw, kind in [
        ({"type": "inline"}, Inline()),
        ({"type": "processes", "count": 2}, Processes(count=2)),
        ({"type": "ray", "address": "10.0.0.1:6379"}, Cluster(address="10.0.0.1:6379")),
    ]:
        assert decode(raw, AnyWorkers) == kind
        assert decode(encode(kind), AnyWorkers) == kind
    with pytest.raises(ValueError, match=r"Expected `int` >= 1 - at `\$.count` of Processes"):
        Processes(count=0)


def test_cores_are_those_of_the_process_and_of_its_container(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    quota = tmp_path / "cpu.max"
    assert workers.cores(quota) == 8
    for text, count in [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1)]:
        quota.write_text(text)
        assert workers.cores(quota) == count


@pytest.mark.parametrize("count", [1, 2, 4])
def test_any_number_of_processes_gives_the_bits_of_inline(expected, count):
    with opened(Processes(count=count), world, train) as found:
        assert found.count == count
        assert found.kind == Processes(count=count)
        assert rounds(found, JOBS) == expected


def test_the_hash_depends_on_the_jobs(expected):
    with opened(Inline(), world, train) as found:
        assert rounds(found, [*JOBS[1:], JOBS[0]]) != expected


def test_a_worker_killed_in_a_job_changes_nothing(expected, tmp_path):
    flag = tmp_path / "killed"
    jobs = [*JOBS[:3], Train(3, JOBS[3].steps, str(flag)), *JOBS[4:]]
    with opened(Processes(count=2), world, train) as found:
        assert rounds(found, jobs) == expected
    assert flag.exists()


def test_results_keep_the_order_of_the_jobs(pool):
    jobs = [("echo", number) for number in range(50)]
    assert pool.run(jobs, {}, cost=lambda job: job[1] % 7) == list(range(50))
    assert pool.run([], {}) == []


def test_every_worker_has_one_thread_and_leaves_ctrl_c_to_the_parent(pool):
    facts = pool.run([("facts",)] * 20, {})
    assert {fact[:3] for fact in facts} == {(1, ("1", "1"), True)}
    assert os.getpid() not in {fact[3] for fact in facts}


def test_starting_workers_leaves_the_environment_as_it_was(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    with opened(Processes(count=1), nothing, act):
        assert os.environ["OMP_NUM_THREADS"] == "5"
        assert "MKL_NUM_THREADS" not in os.environ
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.parametrize("kind", [Inline(), Processes(count=1)])
def test_this_process_has_one_thread_while_workers_are_open(kind):
    torch.set_num_threads(2)
    try:
        with opened(kind, nothing, act):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_jobs_read_this_round_s_parameters_whatever_their_shapes(pool):
    for params in (
        PARAMS,
        {"weight": torch.full((2, 3), 9.0), "count": torch.tensor(5)},
        {"other": torch.randn(300, 50).t(), "empty": torch.empty(0, 3)},
        {},
        PARAMS,
    ):
        for read in pool.run([("read",)] * 4, params):
            assert list(read) == list(params)
            assert all(torch.equal(read[name], params[name]) for name in params)
            assert all(read[name].stride() == params[name].stride() for name in params)


def test_rounds_of_the_same_shapes_use_the_same_memory(pool, folder):
    def files():
        return {(path, path.stat().st_ino) for path in folder.glob("pliant-*/shared-*")}

    large = {"weight": torch.zeros(1000, 10)}
    pool.run([("echo", 1)], large)
    before = files()
    for number in range(3):
        large = {"weight": torch.full((1000, 10), float(number))}
        assert torch.equal(pool.run([("read",)], large)[0]["weight"], large["weight"])
        assert files() == before
    pool.run([("echo", 1)], {"weight": torch.zeros(4000, 10)})
    assert len(files()) == len(before)


@pytest.mark.parametrize("kind", [Inline(), Processes(count=1)])
def test_a_job_that_writes_to_the_parameters_harms_nobody(kind):
    with opened(kind, nothing, act) as found:
        _, read = found.run([("spoil",), ("read",)], PARAMS)
    assert torch.equal(read["weight"], torch.arange(6.0).reshape(2, 3))
    assert PARAMS["count"] == 4


def test_jobs_and_results_of_megabytes_pass(pool):
    large = {"update": torch.randn(2_000_000), "array": np.arange(500_000)}
    for result in pool.run([("echo", large)] * 4, {}):
        assert torch.equal(result["update"], large["update"])
        assert np.array_equal(result["array"], large["array"])


def test_an_exception_comes_with_its_traceback_and_leaves_the_pool_usable(pool):
    for verb, kind, text in [
        ("raise", ValueError, "no such device: 7"),
        ("raise oddly", RuntimeError, "Unpicklable: 1 and 2"),
        ("unpicklable", Exception, "lambda"),
    ]:
        with pytest.raises(kind, match=text) as caught:
            pool.run([("echo", 1), (verb,)], PARAMS)
        note = "\n".join(caught.value.__notes__)
        assert f"in job 1 of 2, ('{verb}',), in a worker:" in note
        assert "worker_jobs.py" in note or verb == "unpicklable"
        assert pool.run([("echo", 5), ("echo", 6)], PARAMS) == [5, 6]


def test_a_job_that_kills_three_workers_in_a_row_is_named(pool):
    with pytest.raises(WorkerLost, match=r"job 1 of 2, \('exit', 3\), .* by exit code 3"):
        pool.run([("echo", 1), ("exit", 3)], PARAMS)
    assert pool.run([("echo", 5)], PARAMS) == [5]


def test_an_ending_is_said_in_words():
    assert processes.ending(3) == "exit code 3"
    assert processes.ending(-9) == "signal 9 (SIGKILL)"


def test_an_idle_worker_that_dies_is_replaced(pool):
    found = {fact[3] for fact in pool.run([("facts",)] * 20, {})}
    for pid in found:
        os.kill(pid, signal.SIGKILL)
    found_after = {fact[3] for fact in pool.run([("facts",)] * 20, {})}
    assert not found & found_after


def test_a_world_that_cannot_be_built_is_an_error_at_once():
    with (
        pytest.raises(LookupError, match="no data here") as caught,
        opened(Processes(count=1), worker_jobs.broken, act) as found,
    ):
        found.run([("echo", 1)], {})
    assert "worker_jobs.py" in caught.value.__notes__[0]


def test_functions_that_cannot_be_sent_are_refused_before_anything_starts():
    with (
        pytest.raises((AttributeError, TypeError), match="lambda"),
        opened(Processes(count=2), lambda: None, act),
    ):
        pass


def test_ctrl_c_in_a_round_ends_the_busy_workers_and_leaves_the_pool_usable(pool, tmp_path):
    started = tmp_path / "started"

    def interrupt():
        _wait_for(lambda: started.exists() and started.read_text())
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        pool.run([("sleep", str(started), 60.0)], {})
    thread.join()
    assert not psutil.pid_exists(int(started.read_text()))
    assert pool.run([("echo", 5)], {}) == [5]


SCRIPT = """
import sys
from pathlib import Path
import torch
from worker_jobs import act, nothing
from pliant.engine import processes
from pliant.engine.workers import Processes, opened

if __name__ == "__main__":
    processes.memory_folder = lambda: Path(sys.argv[1])
    context = opened(Processes(count=1), nothing, act)
    pool = context.__enter__()
    assert pool.run([("echo", 1)], {"weight": torch.zeros(10)}) == [1]
    if len(sys.argv) > 2:
        pool.run([("sleep", sys.argv[2], 60.0)], {"weight": torch.zeros(10)})
"""


def run_script(tmp_path, *arguments, script=SCRIPT):
    file = tmp_path / "script.py"
    file.write_text(script)
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, file, *arguments],
        env=os.environ | {"PYTHONPATH": path},
        stderr=subprocess.PIPE,
        text=True,
    )


def test_workers_of_a_killed_parent_end_in_the_middle_of_a_job(folder, tmp_path):
    started = tmp_path / "started"
    with run_script(tmp_path, folder, started) as parent:
        try:
            _wait_for(lambda: started.exists() and started.read_text())
            worker = psutil.Process(int(started.read_text()))
        finally:
            parent.kill()
        parent.wait()
        worker.wait(10)


def test_a_pool_that_is_never_closed_does_not_hold_the_interpreter(folder, tmp_path):
    with run_script(tmp_path, folder) as parent:
        try:
            _, said = parent.communicate(timeout=60)
        finally:
            parent.kill()
    assert (parent.returncode, said) == (0, "")


@pytest.mark.slow  # four starts, one after another
def test_a_script_without_a_guard_is_told_so(folder, tmp_path):
    unguarded = SCRIPT.replace('if __name__ == "__main__":', "if True:")
    with run_script(tmp_path, folder, script=unguarded) as parent:
        try:
            _, said = parent.communicate(timeout=60)
        finally:
            parent.kill()
    assert parent.returncode == 1
    assert 'under `if __name__ == "__main__":`' in said
    assert said.splitlines()[-1].endswith("ended while starting, at last by exit code 1")


def _wait_for(condition, seconds=30.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
