from itertools import count

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pliant.engine.relay import Answer, Relay
from pliant.engine.workers import Inline, WorkerLost


class ScriptedCrew:
    """Workers that are numbers; a job is what they say, one answer for every attempt."""

    def __init__(self, starts=(), choose=lambda ready: ready[0]):
        self.numbers = count()
        self.starts = iter(starts)
        self.choose = choose
        self.said = {}
        self.handed = []
        self.alive = set()
        self.is_open = True
        self.shared = None

    def hire(self):
        worker = next(self.numbers)
        self.alive.add(worker)
        self.said[worker] = next(self.starts, Answer("ready", None))
        return worker

    def share(self, shared):
        self.shared = shared

    def hand(self, worker, job):
        self.handed.append(job)
        self.said[worker] = job.pop(0) if isinstance(job, list) else Answer("done", job)

    def hear(self, workers):
        worker = self.choose([worker for worker in workers if worker in self.said])
        yield worker, self.said.pop(worker)

    def dismiss(self, workers):
        assert set(workers) <= self.alive
        self.alive -= set(workers)

    def close(self):
        assert not self.alive
        self.is_open = False


def relay(crew, count=2):
    return Relay(Inline(), count, crew)


def lost(reason="signal 9"):
    return Answer("lost", reason)


def test_workers_begin_to_start_at_once_and_end_at_the_close():
    crew = ScriptedCrew()
    pool = relay(crew, 3)
    assert crew.alive == {0, 1, 2}
    pool.close()
    assert not crew.is_open


@given(data=st.data(), workers=st.integers(1, 4), jobs=st.lists(st.integers(), max_size=9))
def test_results_are_in_the_order_of_the_jobs_whoever_answers_first(data, workers, jobs):
    crew = ScriptedCrew(choose=lambda ready: data.draw(st.sampled_from(ready)))
    pool = relay(crew, workers)
    for _ in range(2):
        assert pool.run(jobs, {}, cost=float) == jobs
    pool.close()


def test_the_costliest_goes_first_and_equals_in_order():
    crew = ScriptedCrew()
    relay(crew, 1).run(["b3", "a1", "c3", "d2"], {}, cost=lambda job: float(job[1]))
    assert crew.handed == ["b3", "c3", "d2", "a1"]


def test_parameters_are_shared_once_a_run():
    crew = ScriptedCrew()
    pool = relay(crew)
    params = {"weight": torch.ones(2)}
    pool.run([1, 2, 3], params)
    assert crew.shared is params
    assert pool.run([], {}) == []
    assert crew.shared is params


def test_a_job_whose_worker_dies_runs_again_and_the_worker_is_replaced():
    crew = ScriptedCrew()
    pool = relay(crew)
    assert pool.run([[lost(), lost(), Answer("done", "a")], "b"], {}) == ["a", "b"]
    assert len(crew.alive) == 2
    pool.close()


def test_the_third_death_in_a_row_is_one_error_that_names_job_and_reason():
    crew = ScriptedCrew()
    pool = relay(crew)
    job = [lost("signal 9 (SIGKILL)"), lost(), lost("exit code 3")]
    with pytest.raises(WorkerLost, match=r"job 1 of 2, .*3 times in a row, at last by exit code 3"):
        pool.run(["b", job], {})
    assert pool.run(["c"], {}) == ["c"]
    pool.close()


def test_an_exception_is_raised_once_with_a_note_and_ends_who_is_busy():
    crew = ScriptedCrew()
    pool = relay(crew)
    error = ValueError("no such device")
    job = [Answer("failed", (error, "Traceback of the worker"))]
    with pytest.raises(ValueError, match="no such device") as caught:
        pool.run([job, ["never answered"]], {})
    assert caught.value.__notes__ == ["in job 0 of 2, [], in a worker:\nTraceback of the worker"]
    assert len(crew.alive) == 1
    assert pool.run(["b", "c", "d"], {}) == ["b", "c", "d"]
    pool.close()


def test_a_failed_start_is_an_error_at_once_and_a_lost_one_at_the_third_time():
    failed = Answer("failed", (LookupError("no data"), "Traceback"))
    with pytest.raises(LookupError, match="no data"):
        relay(ScriptedCrew([failed])).run(["a"], {})
    ready = Answer("ready", None)
    pool = relay(ScriptedCrew([lost(), lost(), ready, lost(), lost(), ready]), 1)
    assert pool.run(["a", [lost(), Answer("done", "b")]], {}) == ["a", "b"]
    pool = relay(ScriptedCrew([lost()] * 3), 1)
    with pytest.raises(WorkerLost, match=r"3 workers in a row .* starting, at last by signal 9"):
        pool.run(["a"], {})
    assert pool.run(["a"], {}) == ["a"]


def test_who_did_start_goes_on_when_others_cannot():
    turns = iter([min])  # the first worker is ready before the others are lost
    starts = [Answer("ready", None), lost(), lost(), lost()]
    crew = ScriptedCrew(starts, choose=lambda ready: next(turns, max)(ready))
    pool = relay(crew, 2)
    assert pool.run(["a", "b"], {}) == ["a", "b"]
    assert crew.alive == {0}
    assert pool.run(["c"], {}) == ["c"]
    assert crew.alive == {0, 4}  # every run tries again
    pool.close()


def test_an_idle_worker_that_dies_is_replaced_without_blame():
    crew = ScriptedCrew()
    pool = relay(crew, 2)
    pool.run(["a", "b"], {})
    crew.said[0] = crew.said[1] = lost()

    def hand(worker, job):
        if worker > 1:  # the dead do not answer
            crew.said[worker] = Answer("done", job)

    crew.hand = hand
    assert pool.run(["c"], {}) == ["c"]
    assert crew.alive == {2, 3}
    pool.close()


def test_an_interrupt_while_waiting_ends_who_is_busy():
    crew = ScriptedCrew()
    pool = relay(crew, 2)
    pool.run(["a", "b"], {})

    def interrupt(_):
        raise KeyboardInterrupt

    crew.choose = interrupt
    with pytest.raises(KeyboardInterrupt):
        pool.run(["c"], {})
    assert len(crew.alive) == 1
    crew.choose = lambda ready: ready[0]
    assert pool.run(["d"], {}) == ["d"]
    pool.close()
