"""Real processes: a device with data of its own, a server that cannot read them, and their bytes.

One federation for all of this, as its processes take seconds to start.
"""

import socket
import subprocess
import sys
from contextlib import ExitStack, suppress

import pytest
from tests.deploy.faulty_proxy import FaultyProxy
from tests.deploy.federation_keys import make_federation_keys
from tests.deploy.in_process import simulate_in_process, write_own_data
from tests.deploy.supervise.test_federation import find_free_port
from tests.waiting import LIMIT, wait_until

from pliant.engine.ledger import TaskRecord, verify_records
from pliant.engine.run_store import read_records
from pliant.experiment.config import load_experiment

pytestmark = pytest.mark.waits

SPEC = """
rounds = 1
per_round = 1
[method]
type = "fedavg"
local = { batch = 16 }
[network]  # so large that joining and polling, which are not charged, do not matter
name = "femnist_cnn"
options = { hidden = 2048 }
input = [1, 28, 28]
classes = 10
mean = [0.1307]
std = [0.3081]
[server]
holdout = "holdout"
[fleet]
size = 1
round_seconds = 60.0
[rules]
late = "wait"
[evaluation]
every = 1
[data]  # of the simulation only
proxy = 7860
"""
# root may read everything, so the server's processes refuse to open certain files themselves
HOOK = """
import sys

def refuse(event, arguments):
    path = str(arguments[0]) if event == "open" else ""
    if path.startswith({private!r}) or "data/embedded" in path:
        raise PermissionError(f"the server opens {{path}}")

sys.addaudithook(refuse)
"""


@pytest.fixture
def files(tmp_path):
    """Write the experiment, the devices' data, the server's hold-out images, keys and the hook."""
    (tmp_path / "own.toml").write_text(SPEC)
    experiment = load_experiment(tmp_path / "own.toml")
    write_own_data(experiment, tmp_path / "private")
    write_own_data(experiment, tmp_path / "copies")
    (tmp_path / "copies" / "0" / "test").rename(tmp_path / "holdout")
    make_federation_keys(tmp_path / "keys", devices=1)
    (tmp_path / "hook").mkdir()
    hook = HOOK.format(private=str(tmp_path / "private"))
    (tmp_path / "hook" / "sitecustomize.py").write_text(hook)
    return tmp_path


def is_listening(port):
    with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def start(stack, folder, *arguments):
    command = [sys.executable, "-m", "pliant", *map(str, arguments)]
    process = stack.enter_context(
        subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True)
    )
    stack.callback(process.terminate)
    return process


# Flower's processes take long to start, and test_federation.py runs them
@pytest.mark.parametrize("transport", ["grpc", pytest.param("flower", marks=pytest.mark.slow)])
def test_a_server_that_cannot_read_the_data_trains_the_simulated_network(
    files, monkeypatch, transport
):
    port, run = find_free_port(), files / "run"
    (simulated,) = simulate_in_process(load_experiment(files / "own.toml"))
    with ExitStack() as stack:
        monkeypatch.setenv("PYTHONPATH", str(files / "hook"))
        options = (
            "--transport",
            transport,
            "--keys",
            files / "keys",
            "--port",
            port,
            "--out",
            run,
            "--allowance",
            LIMIT,
            "--patience",
            LIMIT,
        )
        server = start(stack, files, "server", "own.toml", *options)
        monkeypatch.delenv("PYTHONPATH")
        wait_until(lambda: is_listening(port), "the server to listen")
        proxy = FaultyProxy(port)
        stack.callback(proxy.close)
        options = ("--keys", files / "keys" / "devices" / "0", "--data", files / "private" / "0")
        address = f"127.0.0.1:{proxy.port}"
        start(stack, files, "device", "--server", address, "--state", files / "state", *options)
        assert server.wait(2 * LIMIT) == 0, server.stderr.read()
    records = list(read_records(run))
    assert verify_records(records) == 1
    assert {task.outcome for task in records if isinstance(task, TaskRecord)} == {"finished"}
    assert records[-1].digest == simulated.digest
    assert records[-1].on_devices.devices == (0,)
    assert records[-1].score.accuracy == records[-1].on_devices.correct[0] / 20
    # the ledger has the bytes on the wire, in a simulation by formula
    assert records[-1].sent == pytest.approx(proxy.forwarded_bytes, rel=0.02)
    live = records[-1].sent - records[-1].on_devices.sent
    assert simulated.sent == pytest.approx(live, rel=0.02)


def test_the_hook_keeps_a_process_from_the_data(files):
    """Without this, the test above would prove nothing."""
    environment = {"PYTHONPATH": str(files / "hook")}
    for code in (
        f"open({str(files / 'private' / '0' / 'train' / 'digits.npz')!r})",
        "import pliant as pl; pl.data.digits()",
    ):
        process = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True
        )
        assert "PermissionError: the server opens" in process.stderr
