import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from tests.waiting import LIMIT, wait_until
from tests.workers.worker_jobs import Train, build_context, execute, no_context, run_rounds, train

from pliant.workers.pool import InlineWorkers, RayWorkers, open_pool

HERE = Path(__file__).parent
START = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1"]
START += ["--node-ip-address=127.0.0.1", "--object-store-memory=100000000"]

pytestmark = [
    pytest.mark.waits,
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed"),
]


@pytest.fixture(scope="module")
def cluster():
    """Start two nodes with one CPU each that require a token; return address and environment."""
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        environment = os.environ | {
            "HOME": folder,
            "PYTHONPATH": str(HERE.parents[1]),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        port, client = free_ports(2)
        address = f"127.0.0.1:{port}"
        nodes = []
        try:
            head = ["--head", f"--port={port}", f"--ray-client-server-port={client}"]
            head += ["--include-dashboard=false", f"--temp-dir={folder}"]  # a short path
            for arguments in (head, [f"--address={address}"]):
                log = Path(folder, f"node{len(nodes)}.log")
                with log.open("w") as out:
                    output = {"stdout": out, "stderr": out}
                    nodes.append(subprocess.Popen([*START, *arguments], env=environment, **output))
                wait_for_line(log, "will now block forever", nodes[-1])
            yield address, environment
        finally:
            stop(nodes)


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in sockets]
    for server in sockets:
        server.close()
    return ports


def wait_for_line(log, text, process):
    def has_line():
        assert process.poll() is None, log.read_text()
        return text in log.read_text()

    wait_until(has_line, f"{text!r} in {log}")


def stop(nodes):
    """Stop the nodes and all processes that they started."""
    children = []
    for node in nodes:
        children += psutil.Process(node.pid).children(recursive=True)
    for node in reversed(nodes):
        node.terminate()
    for node in nodes:
        node.wait(LIMIT)
    _, alive = psutil.wait_procs(children, timeout=10)
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, timeout=LIMIT)


def run_driver(address, environment, folder):
    command = [sys.executable, HERE / "ray_driver.py", address, folder]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT)


@pytest.mark.slow  # a cluster has a dozen processes
def test_two_nodes_give_the_bits_of_inline_with_and_without_a_kill(cluster, tmp_path):
    process = run_driver(*cluster, tmp_path)
    assert process.returncode == 0, process.stderr
    report = json.loads(process.stdout.splitlines()[-1])
    with open_pool(InlineWorkers(), build_context, train) as pool:
        expected = run_rounds(pool, [Train(device, steps=1 + device % 3) for device in range(6)])
    assert report["hash"] == expected
    assert report["killed"] == expected
    assert (tmp_path / "flag").exists()
    assert report["count"] == len(report["nodes"]) == 2
    assert "no job" in report["note"]


@pytest.mark.slow  # Ray retries for 20 s
def test_a_wrong_token_is_refused(cluster, tmp_path):
    address, environment = cluster
    process = run_driver(address, environment | {"RAY_AUTH_TOKEN": secrets.token_hex(32)}, tmp_path)
    assert process.returncode == 1
    assert f"ConnectionError: no Ray cluster answers at {address}" in process.stderr


def test_an_address_where_nothing_listens_is_a_clear_error():
    address = f"127.0.0.1:{free_ports(1)[0]}"
    for url in (address, f"ray://{address}"):
        with (
            pytest.raises(ConnectionError, match=f"no Ray cluster answers at {url}: .*refused"),
            open_pool(RayWorkers(address=url), no_context, execute),
        ):
            pass
