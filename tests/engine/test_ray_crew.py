import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from worker_jobs import Train, act, nothing, rounds, train, world

from pliant.engine.workers import Cluster, Inline, opened

HERE = Path(__file__).parent
NODE = ["--block", "--node-ip-address=127.0.0.1", "--num-cpus=1", "--object-store-memory=100000000"]

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")


@pytest.fixture(scope="module")
def cluster():
    """Start two nodes of one CPU that ask for a token; return the address and the environment."""
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        environment = os.environ | {
            "HOME": folder,
            "PYTHONPATH": str(HERE),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        port, client = free_ports(2)
        address = f"127.0.0.1:{port}"
        nodes = []
        try:
            for arguments in (
                [
                    "--head",
                    f"--port={port}",
                    f"--ray-client-server-port={client}",
                    "--include-dashboard=false",
                    f"--temp-dir={folder}",  # a socket's path must be short
                ],
                [f"--address={address}"],
            ):
                log = Path(folder, f"node{len(nodes)}.log")
                with log.open("w") as out:
                    command = [sys.executable, "-m", "ray.scripts.scripts", "start"]
                    nodes.append(
                        subprocess.Popen(
                            [*command, *NODE, *arguments], env=environment, stdout=out, stderr=out
                        )
                    )
                wait_for_line(log, "will now block forever", nodes[-1])
            yield address, environment
        finally:
            stop(nodes)


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [found.getsockname()[1] for found in sockets]
    for found in sockets:
        found.close()
    return ports


def wait_for_line(log, text, process, seconds=60.0):
    end = time.monotonic() + seconds
    while text not in log.read_text():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.1)


def stop(nodes):
    """End the nodes and every process that they started, and no other."""
    family = []
    for node in nodes:
        family += psutil.Process(node.pid).children(recursive=True)
    for node in reversed(nodes):
        node.terminate()
    for node in nodes:
        node.wait(20)
    _, alive = psutil.wait_procs(family, timeout=10)
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, timeout=10)


def drive(address, environment, folder):
    return subprocess.run(
        [sys.executable, HERE / "ray_driver.py", address, folder],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_two_nodes_give_the_bits_of_inline_with_and_without_a_kill(cluster, tmp_path):
    answer = drive(*cluster, tmp_path)
    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout.splitlines()[-1])
    with opened(Inline(), world, train) as pool:
        expected = rounds(pool, [Train(device, steps=1 + device % 3) for device in range(6)])
    assert found["hash"] == expected
    assert found["killed"] == expected
    assert (tmp_path / "flag").exists()
    assert found["count"] == len(found["nodes"]) == 2
    assert "no job" in found["note"]


@pytest.mark.slow  # Ray tries for 20 s
def test_a_wrong_token_is_refused(cluster, tmp_path):
    address, environment = cluster
    answer = drive(address, environment | {"RAY_AUTH_TOKEN": secrets.token_hex(32)}, tmp_path)
    assert answer.returncode == 1
    assert f"ConnectionError: no Ray cluster answers at {address}" in answer.stderr


def test_an_address_where_nobody_listens_is_one_clear_line():
    address = f"127.0.0.1:{free_ports(1)[0]}"
    for form in (address, f"ray://{address}"):
        with (
            pytest.raises(ConnectionError, match=f"no Ray cluster answers at {form}: .*refused"),
            opened(Cluster(address=form), nothing, act),
        ):
            pass
