"""Metrics and health checks, scraped over HTTP from a supervisor of a finished run."""

import time
import urllib.error
import urllib.request
from itertools import pairwise

import msgspec
import pytest

import pliant as pl
from pliant.deploy.server.presence import PresenceWriter
from pliant.deploy.server.run_totals import STEP_BUCKETS, RunTotals, TotalsReader
from pliant.deploy.supervise.monitor import STUCK_SECONDS, ServerMonitor, open_monitor
from pliant.deploy.supervise.supervisor import Supervisor


class FakeService:
    def __init__(self, name):
        self.name = name


class IdleSupervisor(Supervisor):
    """A supervisor whose processes are only said to run."""

    running = ("superlink", "run")

    @property
    def pids(self):
        return dict.fromkeys(self.running, 1)


def make_task(device, outcome, **fields):
    done = outcome in ("finished", "partial")
    plain = {"round": 0, "samples": 8 * done, "steps": 2 * done, "macs": 4e6, "useful": 4e6 * done}
    plain |= {"available": 9e6, "down": 100, "up": 50 * done, "seconds": 2.0, "joules": 0.0}
    times = {"starts": (0.0, 0.5), "ends": (0.5, 2.0), "rows": (3, 1)}
    return pl.TaskRecord(**plain, device=device, outcome=outcome, control=7, **times, **fields)


@pytest.fixture
def folder(tmp_path):
    """Return the folder of a run with one round of three tasks."""
    from pliant.engine.ledger import sum_tasks
    from pliant.engine.run_store import RunStore
    from pliant.storage.run_dir import create_run_dir

    create_run_dir(tmp_path, {"rounds": 5, "fleet": {"size": 4}})
    tasks = [make_task(0, "finished", loss=0.5), make_task(1, "late")]
    tasks.append(make_task(3, "rejected: device 3: expected a number"))
    store = RunStore(tmp_path)
    store.append([*tasks, sum_tasks(0, 12.5, tasks)])
    store.close()
    return tmp_path


@pytest.fixture
def supervisor(folder):
    services = [FakeService("superlink"), FakeService("run")]
    return IdleSupervisor(folder, "server.lock", services)


@pytest.fixture
def get(supervisor):
    monitor = ServerMonitor(supervisor, "127.0.0.1", 0)
    monitor.start()

    def get(path, method="GET"):
        url = f"http://127.0.0.1:{monitor.port}{path}"
        try:
            with urllib.request.urlopen(urllib.request.Request(url, method=method)) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    yield get
    monitor.close()


def parse(text):
    """Read Prometheus' text format: names with labels to numbers."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_metrics_count_what_the_records_say(get, folder):
    PresenceWriter(folder).note_online({0, 3})
    status, text = get("/metrics")
    assert status == 200
    found = parse(text)
    expected = {
        "pliant_rounds_total": 1,
        "pliant_rounds_merged_total": 1,
        "pliant_rounds_planned": 5,
        'pliant_tasks_total{outcome="finished"}': 1,
        'pliant_tasks_total{outcome="late"}': 1,
        'pliant_tasks_total{outcome="rejected"}': 1,
        'pliant_bytes_total{direction="down"}': 300,
        'pliant_bytes_total{direction="up"}': 50,
        'pliant_bytes_total{direction="control"}': 21,
        "pliant_devices": 4,
        "pliant_devices_online": 2,
        "pliant_training_loss": 0.5,
        "pliant_run_seconds": 12.5,
        'pliant_process_up{process="superlink"}': 1,
        'pliant_step_seconds_bucket{le="0.3"}': 0,
        'pliant_step_seconds_bucket{le="1.0"}': 3,
        'pliant_step_seconds_bucket{le="+Inf"}': 6,
        "pliant_step_seconds_count": 6,
        "pliant_step_seconds_sum": 6.0,
    }
    assert {name: found.get(name) for name in expected} == expected
    assert "device 3" not in text  # no reason and no name leaves the server


def test_prometheus_own_parser_reads_the_metrics(get):
    parser = pytest.importorskip("prometheus_client.parser")
    families = {f.name: f for f in parser.text_string_to_metric_families(get("/metrics")[1])}
    assert families["pliant_step_seconds"].type == "histogram"
    assert families["pliant_tasks"].type == "counter"


def test_counters_continue_after_a_restart_and_follow_new_records(get, folder):
    from pliant.engine.ledger import sum_tasks
    from pliant.engine.run_store import RunStore

    before = parse(get("/metrics")[1])["pliant_rounds_total"]
    store = RunStore(folder)
    store.append([sum_tasks(1, 20.0, [])])
    store.close()
    after = parse(get("/metrics")[1])
    assert (before, after["pliant_rounds_total"], after["pliant_rounds_merged_total"]) == (1, 2, 1)
    assert TotalsReader(folder).read().rounds == 2


def test_rounds_that_a_resumed_run_has_dropped_do_not_count(folder):
    reader = TotalsReader(folder)
    assert reader.read().rounds == 1
    header = (folder / "events.jsonl").read_bytes().splitlines(keepends=True)[0]
    (folder / "events.jsonl").write_bytes(header)
    assert reader.read().rounds == 0


def test_nobody_is_online_once_the_server_has_not_looked_for_long(get, folder):
    PresenceWriter(folder, lambda: time.time() - 7200).note_online({0, 1})
    assert parse(get("/metrics")[1])["pliant_devices_online"] == 0


def test_health_and_readiness(get, supervisor):
    assert get("/healthz") == (200, "ok\n")
    assert get("/readyz") == (200, "ok\n")
    supervisor.running = ("superlink",)
    assert get("/readyz") == (503, "waiting for run\n")
    supervisor.checked_at = time.monotonic() - 2 * STUCK_SECONDS
    status, text = get("/healthz")
    assert (status, text.startswith("stuck for 1")) == (503, True)


def test_nothing_else_is_served(get, folder):
    for path in ("/", "/config.json", "/metrics/../config.json", "/metrics?x=1"):
        assert get(path)[0] == 404
    assert get("/metrics", method="POST")[0] == 501


def test_a_taken_port_is_named_in_one_line(supervisor):
    monitor = ServerMonitor(supervisor, "127.0.0.1", 0)
    with (
        pytest.raises(ValueError, match=f"Cannot listen on 127.0.0.1:{monitor.port} for metrics"),
        open_monitor(supervisor, "127.0.0.1", monitor.port),
    ):
        pass
    monitor.close()


def test_steps_are_counted_in_the_bucket_that_they_end():
    totals, times = RunTotals(), (0.0, 0.001, 0.0045, 100.0)
    totals.add_task(make_task(0, "finished"))
    assert sum(totals.step_counts) == 2
    limits = [*STEP_BUCKETS, float("inf")]
    steps = [end - start for start, end in pairwise(times)]
    expected = [sum(low < step <= high for step in [*steps, 0.5, 1.5])
                for low, high in zip([0.0, *limits], limits, strict=False)]  # fmt: skip
    more = msgspec.structs.replace(make_task(0, "finished"), starts=times[:-1], ends=times[1:])
    totals.add_task(more)
    assert totals.step_counts == expected
