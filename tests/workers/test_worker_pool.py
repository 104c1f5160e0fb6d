from itertools import count

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pliant.workers.pool import Pool, WorkerLost, WorkerReply


class ScriptedBackend:
    """Workers that are numbers; a job is its own result or a list of replies, one per attempt."""

    def __init__(self, starts=(), choose=lambda ready: ready[0]):
        self.numbers, self.starts, self.choose = count(), iter(starts), choose
        self.replies, self.submitted, self.alive = {}, [], set()
        self.is_open, self.shared, self.released = True, {}, []

    def start(self):
        worker = next(self.numbers)
        self.alive.add(worker)
        self.replies[worker] = next(self.starts, WorkerReply("ready", None))
        return worker

    def share(self, params, version):
        self.shared[version] = params

    def release(self, version):
        self.released.append(self.shared.pop(version))

    def submit(self, worker, job, version):
        self.submitted.append(job)
        self.replies[worker] = job.pop(0) if isinstance(job, list) else WorkerReply("done", job)

    def poll(self, workers):
        worker = self.choose([worker for worker in workers if worker in self.replies])
        yield worker, self.replies.pop(worker)

    def stop(self, workers):
        assert set(workers) <= self.alive
        self.alive -= set(workers)

    def close(self):
        assert not self.alive
        self.is_open = False


def make_pool(count=2, **options):
    backend = ScriptedBackend(**options)
    return backend, Pool(count, backend)


def lost_reply(reason="signal 9"):
    return WorkerReply("lost", reason)


def test_workers_start_at_once_and_stop_on_close():
    backend, pool = make_pool(3)
    assert backend.alive == {0, 1, 2}
    pool.close()
    assert not backend.is_open


@given(data=st.data(), workers=st.integers(1, 4), jobs=st.lists(st.integers(), max_size=9))
def test_results_are_in_the_order_of_the_jobs_whichever_worker_is_first(data, workers, jobs):
    _, pool = make_pool(workers, choose=lambda ready: data.draw(st.sampled_from(ready)))
    for _ in range(2):
        assert pool.run(jobs, {}, cost=float) == jobs
    pool.close()


def test_the_costliest_job_runs_first_and_ties_in_order():
    backend, pool = make_pool(1)
    pool.run(["b3", "a1", "c3", "d2"], {}, cost=lambda job: float(job[1]))
    assert backend.submitted == ["b3", "c3", "d2", "a1"]


def test_parameters_are_shared_once_per_run():
    backend, pool = make_pool()
    params = {"weight": torch.ones(2)}
    pool.run([1, 2, 3], params)
    assert backend.released == [params]
    assert pool.run([], {}) == []
    assert (backend.shared, len(backend.released)) == ({}, 1)


def test_jobs_of_several_versions_run_at_once_and_are_collected_in_any_order():
    backend, pool = make_pool(3)
    old, new = pool.share({"weight": torch.zeros(1)}), pool.share({"weight": torch.ones(1)})
    a, b, c = pool.submit("a", old), pool.submit("b", new), pool.submit("c", old)
    assert pool.collect([c]) == (c, "c")
    assert {pool.collect([a, b]), pool.collect([a, b])} == {(a, "a"), (b, "b")}
    pool.release(old)
    assert backend.shared.keys() == {new}
    pool.close()


def test_a_stream_yields_in_order_and_holds_few_results():
    backend, pool = make_pool(2, choose=max)
    results, held = [], 0
    for result in pool.stream(list(range(20)), {}):
        results.append(result)
        held = max(held, len(backend.submitted) - len(results))
    assert results == list(range(20))
    assert held <= 4
    assert backend.shared == {}
    pool.close()


def test_a_stream_that_is_left_early_leaves_nothing_behind():
    backend, pool = make_pool(2)
    stream = pool.stream(["a", "b", "c", "d", "e"], {})
    assert next(stream) == "a"
    stream.close()
    assert backend.shared == {}
    assert pool.run(["f"], {}) == ["f"]
    pool.close()


def test_a_job_whose_worker_dies_runs_again_and_the_worker_is_replaced():
    backend, pool = make_pool()
    assert pool.run([[lost_reply(), lost_reply(), WorkerReply("done", "a")], "b"], {}) == ["a", "b"]
    assert len(backend.alive) == 2
    pool.close()


def test_the_third_death_in_a_row_is_an_error_that_names_job_and_reason():
    _, pool = make_pool()
    job = [lost_reply("signal 9 (SIGKILL)"), lost_reply(), lost_reply("exit code 3")]
    text = r"job .*killed 3 workers in a row \(last: exit code 3\)"
    with pytest.raises(WorkerLost, match=text):
        pool.run(["b", job], {})
    assert pool.run(["c"], {}) == ["c"]
    pool.close()


def test_an_exception_is_raised_with_a_note_and_stops_busy_workers():
    backend, pool = make_pool()
    error = ValueError("no such device")
    job = [WorkerReply("failed", (error, "Traceback of the worker"))]
    with pytest.raises(ValueError, match="no such device") as caught:
        pool.run([job, ["no reply"]], {})
    assert caught.value.__notes__ == ["in job [], in a worker:\nTraceback of the worker"]
    assert len(backend.alive) == 1
    assert pool.run(["b", "c", "d"], {}) == ["b", "c", "d"]
    pool.close()


def test_a_failed_start_is_an_error_at_once_and_a_lost_one_the_third_time():
    failed = WorkerReply("failed", (LookupError("no data"), "Traceback"))
    with pytest.raises(LookupError, match="no data"):
        make_pool(starts=[failed])[1].run(["a"], {})
    _, pool = make_pool(1, starts=[lost_reply(), lost_reply(), WorkerReply("ready", None)] * 2)
    assert pool.run(["a", [lost_reply(), WorkerReply("done", "b")]], {}) == ["a", "b"]
    _, pool = make_pool(1, starts=[lost_reply()] * 3)
    with pytest.raises(WorkerLost, match=r"3 workers in a row .* starting \(last: signal 9\)"):
        pool.run(["a"], {})
    assert pool.run(["a"], {}) == ["a"]


def test_started_workers_continue_when_others_cannot_start():
    choices = iter([min])  # the first worker is ready before the others are lost
    starts = [WorkerReply("ready", None), lost_reply(), lost_reply(), lost_reply()]
    backend, pool = make_pool(starts=starts, choose=lambda ready: next(choices, max)(ready))
    assert pool.run(["a", "b"], {}) == ["a", "b"]
    assert backend.alive == {0}
    assert pool.run(["c"], {}) == ["c"]
    assert backend.alive == {0, 4}  # every run tries again
    pool.close()


def test_an_idle_worker_that_dies_is_replaced_without_blaming_a_job():
    backend, pool = make_pool()
    pool.run(["a", "b"], {})
    backend.replies[0] = backend.replies[1] = lost_reply()

    def submit(worker, job, version):
        if worker > 1:  # dead workers do not reply
            backend.replies[worker] = WorkerReply("done", job)

    backend.submit = submit
    assert pool.run(["c"], {}) == ["c"]
    assert backend.alive == {2, 3}
    pool.close()


def test_an_interrupt_while_waiting_stops_busy_workers():
    backend, pool = make_pool()
    pool.run(["a", "b"], {})

    def interrupt(_):
        raise KeyboardInterrupt

    backend.choose = interrupt
    with pytest.raises(KeyboardInterrupt):
        pool.run(["c"], {})
    assert len(backend.alive) == 1
    backend.choose = lambda ready: ready[0]
    assert pool.run(["d"], {}) == ["d"]
    pool.close()
