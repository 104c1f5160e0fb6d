import gc
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import psutil
import pytest
import torch
from tests.waiting import LIMIT, wait_until
from tests.workers import worker_jobs
from tests.workers.worker_jobs import (
    Train,
    build_context,
    execute,
    list_workers,
    no_context,
    run_rounds,
    train,
)

from pliant.value import decode, encode
from pliant.workers import pool as pools
from pliant.workers import process_backend
from pliant.workers.pool import InlineWorkers, ProcessWorkers, RayWorkers, WorkerLost, open_pool
from pliant.workers.shared_memory import choose_memory_folder

pytestmark = pytest.mark.waits

JOBS = [Train(device, steps=1 + device % 3) for device in range(6)]
PARAMS = {"weight": torch.arange(6.0).reshape(2, 3), "count": torch.tensor(4)}


@pytest.fixture(scope="module", autouse=True)
def folder():
    """Use a folder in memory of this test run only."""
    with (
        TemporaryDirectory(prefix="pliant-test-", dir=choose_memory_folder()) as name,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(process_backend, "choose_memory_folder", lambda: Path(name))
        yield Path(name)


@pytest.fixture(autouse=True)
def check_for_leftovers(folder):
    before = list_leftovers(folder)
    yield
    gc.collect()
    assert list_leftovers(folder) == before


def list_leftovers(folder):
    """Return the folders of pools and the number of their processes."""
    return set(folder.iterdir()), len(list_workers())


@pytest.fixture(scope="module")
def expected():
    with open_pool(InlineWorkers(), build_context, train) as pool:
        return run_rounds(pool, JOBS)


@pytest.fixture(scope="module")
def pool(folder):
    with open_pool(ProcessWorkers(count=2), no_context, execute) as pool:
        yield pool


def test_workers_are_read_from_plain_data():
    for raw, workers in [
        ({"type": "inline"}, InlineWorkers()),
        ({"type": "processes", "count": 2}, ProcessWorkers(count=2)),
        ({"type": "ray", "address": "10.0.0.1:6379"}, RayWorkers(address="10.0.0.1:6379")),
    ]:
        assert decode(raw, pools.AnyWorkers) == workers
        assert decode(encode(workers), pools.AnyWorkers) == workers
    with pytest.raises(ValueError, match=r"Expected `int` >= 1 - at `\$.count` of ProcessWorkers"):
        ProcessWorkers(count=0)


def test_cores_follow_the_affinity_and_the_quota(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    quota = tmp_path / "cpu.max"
    assert pools.count_cores(tmp_path) == 8
    for text, count in [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1)]:
        quota.write_text(text)
        assert pools.count_cores(tmp_path) == count


@pytest.mark.parametrize("count", [1, 2])
def test_process_workers_give_the_bits_of_inline(expected, count):
    with open_pool(ProcessWorkers(count=count), build_context, train) as pool:
        assert pool.count == count
        assert run_rounds(pool, JOBS) == expected


def test_the_hash_depends_on_the_jobs(expected):
    with open_pool(InlineWorkers(), build_context, train) as pool:
        assert run_rounds(pool, [*JOBS[1:], JOBS[0]]) != expected


def test_a_worker_killed_in_a_job_changes_nothing(expected, tmp_path):
    flag = tmp_path / "killed"
    jobs = [*JOBS[:3], Train(3, JOBS[3].steps, str(flag)), *JOBS[4:]]
    with open_pool(ProcessWorkers(count=2), build_context, train) as pool:
        assert run_rounds(pool, jobs) == expected
    assert flag.exists()


def test_results_keep_the_order_of_the_jobs(pool):
    jobs = [("echo", number) for number in range(50)]
    assert pool.run(jobs, {}, cost=lambda job: job[1] % 7) == list(range(50))
    assert pool.run([], {}) == []


def test_every_worker_has_one_thread_and_ignores_ctrl_c(pool):
    facts = pool.run([("facts",)] * 20, {})
    assert {fact[:3] for fact in facts} == {(1, ("1", "1"), True)}
    assert os.getpid() not in {fact[3] for fact in facts}


def test_starting_workers_restores_the_environment(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    with open_pool(ProcessWorkers(count=1), no_context, execute):
        assert os.environ["OMP_NUM_THREADS"] == "5"
        assert "MKL_NUM_THREADS" not in os.environ
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_workers_have_the_environment_of_their_start(pool, monkeypatch):
    pool.run([("echo", 1)], {})  # the process that forks has started before
    monkeypatch.setenv("PLIANT_TEST_WORD", "later")
    with open_pool(ProcessWorkers(count=1), no_context, execute) as later:
        assert later.run([("environment", "PLIANT_TEST_WORD")], {}) == ["later"]
    assert pool.run([("environment", "PLIANT_TEST_WORD")], {}) == [None]


@pytest.mark.parametrize("workers", [InlineWorkers(), ProcessWorkers(count=1)])
def test_this_process_has_one_thread_while_workers_are_open(workers):
    torch.set_num_threads(2)
    try:
        with open_pool(workers, no_context, execute):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_jobs_read_the_parameters_of_the_current_round(pool):
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
    def list_files():
        return {(path, path.stat().st_ino) for path in folder.glob("pliant-*/shared")}

    params = {"weight": torch.zeros(1000, 10)}
    pool.run([("echo", 1)], params)
    before = list_files()
    for number in range(3):
        params = {"weight": torch.full((1000, 10), float(number))}
        assert torch.equal(pool.run([("read",)], params)[0]["weight"], params["weight"])
        assert list_files() == before
    pool.run([("echo", 1)], {"weight": torch.zeros(4000, 10)})
    assert len(list_files()) == len(before)


@pytest.mark.parametrize("workers", [InlineWorkers(), ProcessWorkers(count=1)])
def test_a_job_that_overwrites_the_parameters_affects_no_other(workers):
    with open_pool(workers, no_context, execute) as pool:
        _, read = pool.run([("overwrite",), ("read",)], PARAMS)
    assert torch.equal(read["weight"], torch.arange(6.0).reshape(2, 3))
    assert PARAMS["count"] == 4


def test_jobs_and_results_may_be_megabytes(pool):
    large = {"update": torch.randn(2_000_000), "array": np.arange(500_000)}
    for result in pool.run([("echo", large)] * 4, {}):
        assert torch.equal(result["update"], large["update"])
        assert np.array_equal(result["array"], large["array"])


def test_an_exception_comes_with_its_traceback_and_leaves_the_pool_usable(pool):
    for command, kind, text in [
        ("raise", ValueError, "no such device: 7"),
        ("raise unpicklable", RuntimeError, "Unpicklable: 1 and 2"),
        ("return unpicklable", Exception, "lambda"),
    ]:
        with pytest.raises(kind, match=text) as caught:
            pool.run([("echo", 1), (command,)], PARAMS)
        note = "\n".join(caught.value.__notes__)
        assert f"in job ('{command}',), in a worker:" in note
        assert "worker_jobs.py" in note or command == "return unpicklable"
        assert pool.run([("echo", 5), ("echo", 6)], PARAMS) == [5, 6]


def test_a_job_that_kills_three_workers_in_a_row_is_named(pool):
    with pytest.raises(WorkerLost, match=r"job \('exit', 3\) .* \(last: exit code 3\)"):
        pool.run([("echo", 1), ("exit", 3)], PARAMS)
    assert pool.run([("echo", 5)], PARAMS) == [5]


def test_an_exit_is_described():
    assert process_backend.describe_exit(3) == "exit code 3"
    assert process_backend.describe_exit(-9) == "signal 9 (SIGKILL)"


def test_an_idle_worker_that_dies_is_replaced(pool):
    pids = {fact[3] for fact in pool.run([("facts",)] * 20, {})}
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    new_pids = {fact[3] for fact in pool.run([("facts",)] * 20, {})}
    assert not pids & new_pids


def test_a_setup_that_fails_is_an_error_at_once():
    with (
        pytest.raises(LookupError, match="no data here") as caught,
        open_pool(ProcessWorkers(count=1), worker_jobs.failing_context, execute) as pool,
    ):
        pool.run([("echo", 1)], {})
    assert "worker_jobs.py" in caught.value.__notes__[0]


def test_unpicklable_functions_are_refused_before_anything_starts():
    with (
        pytest.raises((AttributeError, TypeError), match="lambda"),
        open_pool(ProcessWorkers(count=2), lambda: None, execute),
    ):
        pass


def test_ctrl_c_stops_the_busy_workers_and_leaves_the_pool_usable(pool, tmp_path):
    started = tmp_path / "started"

    def interrupt():
        wait_until(lambda: started.exists() and started.read_text(), "the job to start")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        pool.run([("sleep", str(started), LIMIT)], {})
    thread.join()
    assert not psutil.pid_exists(int(started.read_text()))
    assert pool.run([("echo", 5)], {}) == [5]


SCRIPT = """
import sys
from pathlib import Path
import torch
from tests.workers.worker_jobs import execute, no_context
from pliant.workers import process_backend
from pliant.workers.pool import ProcessWorkers, open_pool

if __name__ == "__main__":
    process_backend.choose_memory_folder = lambda: Path(sys.argv[1])
    context = open_pool(ProcessWorkers(count=1), no_context, execute)
    pool = context.__enter__()
    assert pool.run([("echo", 1)], {"weight": torch.zeros(10)}) == [1]
    if len(sys.argv) > 2:
        pool.run([("sleep", sys.argv[2], 3600.0)], {"weight": torch.zeros(10)})
"""


def start_script(tmp_path, *arguments, script=SCRIPT):
    file = tmp_path / "script.py"
    file.write_text(script)
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, file, *arguments],
        env=os.environ | {"PYTHONPATH": path},
        stderr=subprocess.PIPE,
        text=True,
    )


def run_script(tmp_path, folder, script=SCRIPT):
    with start_script(tmp_path, folder, script=script) as parent:
        try:
            _, errors = parent.communicate(timeout=LIMIT)
        finally:
            parent.kill()
    return parent.returncode, errors


FORKING_SCRIPT = """
import os, signal, sys, threading
from multiprocessing import active_children, connection
from pathlib import Path
import psutil
from pliant.storage.run_lock import RunLock
from pliant.workers.pool import ProcessWorkers, open_pool
from tests.workers.worker_jobs import execute, list_workers, no_context

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which must not apply to workers
    lock = RunLock(Path(sys.argv[1], "run"))
    with open_pool(ProcessWorkers(count=2), no_context, execute) as pool:
        assert pool.run([("echo", 1)], {}) == [1]
        assert [worker.ppid() for worker in list_workers()] == [os.getpid()] * 2
        assert connection.wait([child.sentinel for child in active_children()], 0) == []
        lock.release()
        RunLock(Path(sys.argv[1], "run"))  # no worker has kept it
        list_workers()[0].terminate()
        assert pool.run([("echo", 1)] * 3, {}) == [1] * 3
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    with open_pool(ProcessWorkers(count=2), no_context, execute) as pool:
        assert pool.run([("echo", 1)], {}) == [1]
        [server] = {worker.ppid() for worker in list_workers()}
    assert server != os.getpid()
    assert psutil.Process(server).num_threads() == 1
    assert "pliant.workers.preload" in " ".join(psutil.Process(server).cmdline())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")
def test_workers_are_forked_from_this_process_or_if_it_has_threads_from_another(
    folder, tmp_path, monkeypatch
):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert run_script(tmp_path, tmp_path, FORKING_SCRIPT) == (0, "")


def test_workers_of_a_killed_parent_stop_in_the_middle_of_a_job(folder, tmp_path):
    started = tmp_path / "started"
    with start_script(tmp_path, folder, started) as parent:
        try:
            wait_until(lambda: started.exists() and started.read_text(), "the job to start")
            worker = psutil.Process(int(started.read_text()))
        finally:
            parent.kill()
        parent.wait()
        worker.wait(LIMIT)


def test_a_pool_that_is_never_closed_does_not_block_exit(folder, tmp_path):
    assert run_script(tmp_path, folder) == (0, "")


@pytest.mark.slow  # four starts, one after another
def test_a_script_without_a_main_guard_is_an_error(folder, tmp_path):
    threaded = (
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()"
    )
    unguarded = SCRIPT.replace('if __name__ == "__main__":', f"{threaded}\nif True:")
    returncode, errors = run_script(tmp_path, folder, unguarded)
    assert returncode == 1
    assert 'under `if __name__ == "__main__":`' in errors
    assert errors.splitlines()[-1].endswith("died while starting (last: exit code 1)")
