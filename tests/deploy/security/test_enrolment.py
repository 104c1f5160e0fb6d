"""Enrolment with both kinds of real server processes, live, and attacks on it."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from tests.deploy.grpc_in_process import make_experiment as make_split_experiment
from tests.deploy.in_process import make_experiment
from tests.deploy.supervise.test_federation import find_free_port
from tests.waiting import LIMIT, wait_until

from pliant.cli import main
from pliant.deploy.device.host import Limits
from pliant.deploy.security import enrolment
from pliant.deploy.security.certificates import (
    find_device_files,
    make_device_key,
    make_keys,
    read_federation_name,
)
from pliant.deploy.security.enrolment import (
    FAILURE_BURST,
    EnrolmentService,
    enrol_device,
    make_request,
)
from pliant.deploy.security.registry import DeviceRegistry, EnrolmentRefused, parse_token
from pliant.deploy.settings import ServerSettings
from pliant.deploy.supervise.child_process import run_supervisor
from pliant.deploy.supervise.federation import open_run
from pliant.deploy.supervise.node import DeviceSupervisor
from pliant.deploy.supervise.server import ServerSupervisor

SETTINGS = ServerSettings(allowance=30.0, patience=LIMIT)  # a task of an old key is given up


@contextmanager
def run_server(kind, folder, *, size=1):
    """Run a server that waits for devices; return its port."""
    make_keys(folder / "keys")
    fields = {"fleet": {"size": size, "round_seconds": 10.0}, "rounds": 500}
    if kind == "split":
        experiment = make_split_experiment(folder, "splitfed", **fields)
    else:
        experiment = make_experiment(**fields, per_round=size)
    open_run(folder / "run", experiment)
    port = find_free_port()
    server = ServerSupervisor(kind, folder / "run", SETTINGS, port=port, keys=folder / "keys")
    with run_supervisor(server):
        yield server, port


def issue_token(capsys, folder, *words):
    assert main(["server", "devices", *words, "--keys", str(folder / "keys")]) == 0
    return capsys.readouterr().out.strip()


def enrol(port, token, folder):
    words = ["--server", f"127.0.0.1:{port}", "--token", token, "--keys", str(folder)]
    return main(["device", "enrol", *words])


def start_device(kind, folder, keys, port):
    ca, key, number = find_device_files(keys)
    limits = Limits(code=str(folder))
    address = f"127.0.0.1:{port}"
    return DeviceSupervisor(kind, number, address, folder / "state", limits, ca=ca, key=key)


def wait_for_line(path, text):
    wait_until(lambda: path.exists() and text in path.read_text(), f"{text!r} in {path.name}")


def has_joined(server, kind, times=1):
    path = server.folder / "logs" / "server.log"
    if kind == "federated":
        return lambda: server._follower.read_rounds()
    return lambda: path.exists() and path.read_text().count("device 0 joined") >= times


def find_private_keys(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.name for path in files if b"PRIVATE KEY" in path.read_bytes()}


@pytest.mark.waits
@pytest.mark.parametrize("kind", [pytest.param("federated", marks=pytest.mark.slow), "split"])
def test_attacks_fail_and_a_device_is_approved_rotated_and_revoked_live(kind, tmp_path, capsys):
    """One server for both, as it takes seconds to start."""
    with run_server(kind, tmp_path) as (server, port):
        keys, fingerprint = attack_enrolment(port, tmp_path, capsys)
        assert (keys / "key").stat().st_mode & 0o777 == 0o600
        assert issue_token(capsys, tmp_path, "list") == f"0  pending   {fingerprint}"
        device = start_device(kind, tmp_path, keys, port)
        log = tmp_path / "state" / "logs" / f"{'worker' if kind == 'split' else 'supernode'}.log"
        with run_supervisor(device):
            wait_for_line(log, "waits for approval")
            issue_token(capsys, tmp_path, "approve", "0")
            wait_until(has_joined(server, kind), "the device to join")
            # the old key is valid until the new one is enrolled, then the device continues with it
            token = issue_token(capsys, tmp_path, "rotate", "0")
            assert enrol(port, token, keys) == 0
            new = capsys.readouterr().out.split()[-1]
            assert issue_token(capsys, tmp_path, "list") == f"0  approved  {new}" != fingerprint
            rounds = len(server._follower.read_rounds())

            def has_continued():
                device.restart_dead()
                return len(server._follower.read_rounds()) > rounds + 1

            wait_until(has_continued, "rounds with the new key")
            issue_token(capsys, tmp_path, "revoke", "0")
            if kind == "split":
                wait_until(lambda: not device.services[0].process.is_alive, "the device to end")
                assert log.read_text().endswith("device 0: expected a registered key\n")
            else:
                wait_for_line(log, "expected a registered key")
    assert find_private_keys(tmp_path / "keys") == {"ca.key", "server.key"}
    assert find_private_keys(tmp_path / "run") == set()


def attack_enrolment(port, folder, capsys):
    """Try a forged token, that of another server, and one token twice at the same time.

    Each failure is one line, and nothing is written. Return the folder and the fingerprint of the
    key that won the race.
    """
    token = issue_token(capsys, folder, "token")
    forged = f"0-{32 * 'a'}-{token[-32:]}"
    wait_until(
        lambda: (
            enrol(port, forged, folder / "a") == 2
            and "was issued and not used" in capsys.readouterr().err
        ),
        "the server to answer",
    )
    other_server = token[:-32] + 32 * "0"
    assert enrol(port, other_server, folder / "a") == 2
    assert "expected the authority of the token, got another" in capsys.readouterr().err
    assert not (folder / "a").exists()
    command = [sys.executable, "-m", "pliant", "device", "enrol"]
    command += ["--server", f"127.0.0.1:{port}", "--keys"]

    def run(name):
        return subprocess.run(
            [*command, str(folder / name)],
            input=token, capture_output=True, text=True, timeout=LIMIT, check=False,
        )  # fmt: skip

    with ThreadPoolExecutor(2) as pool:
        results = dict(zip(names := ("left", "right"), pool.map(run, names), strict=True))
    assert sorted(result.returncode for result in results.values()) == [0, 2]
    [winner] = [name for name in results if (folder / name).exists()]
    assert results[winner].returncode == 0
    assert sorted(result.stderr.count("\n") for result in results.values()) == [0, 1]
    assert list(DeviceRegistry(folder / "keys").read()) == [0]
    return folder / winner, results[winner].stdout.split()[-1]


def make_service(tmp_path):
    make_keys(tmp_path / "keys")
    registry = DeviceRegistry(tmp_path / "keys")
    federation = read_federation_name(tmp_path / "keys" / "ca.crt")
    service = EnrolmentService(tmp_path / "keys", registry)

    def send(request, address="here"):
        return json.loads(service.answer(enrolment.msgspec.json.encode(request).decode(), address))

    return registry, federation, send


def test_a_replay_changes_nothing_and_is_refused_after_a_revocation(tmp_path):
    registry, federation, send = make_service(tmp_path)
    request = make_request(registry.issue_token(0, seconds=60), federation, *make_device_key())
    assert send(request)["reason"] == ""
    before = registry.read()
    assert send(request)["reason"] == ""  # as a device does whose connection broke
    assert registry.read() == before
    registry.revoke(0)
    assert "was issued and not used" in send(request)["reason"]


def test_a_device_enrols_only_a_key_that_it_has(tmp_path):
    """Neither the public key of another, nor a request for another number or federation."""
    registry, federation, send = make_service(tmp_path)
    token = registry.issue_token(0, seconds=60)
    (private, _), (_, public_of_another) = make_device_key(), make_device_key()
    wrong = [
        make_request(token, federation, private, public_of_another),
        make_request(token, "of another server", *make_device_key()),
        enrolment.msgspec.structs.replace(
            make_request(token, federation, *make_device_key()), number=1
        ),
    ]
    for request in wrong:
        assert send(request)["reason"] == "expected a signature by the key that is enrolled"
    assert registry.read()[0].status == "invited"


def test_guesses_of_tokens_are_limited_by_address(tmp_path):
    registry, federation, send = make_service(tmp_path)
    token = registry.issue_token(0, seconds=60)
    guess = parse_token(f"0-{32 * 'a'}-{token.authority}")
    request = make_request(guess, federation, *make_device_key())
    reasons = [send(request)["reason"] for _ in range(200)]
    assert sum("was issued" in reason for reason in reasons) <= FAILURE_BURST + 10
    assert "expected fewer attempts" in reasons[-1]
    right = make_request(token, federation, *make_device_key())
    assert "expected fewer attempts" in send(right)["reason"]
    assert send(right, "elsewhere")["reason"] == ""


def test_as_many_devices_as_have_tokens_enrol_from_one_address(tmp_path):
    registry, federation, send = make_service(tmp_path)
    tokens = registry.issue_tokens(int(FAILURE_BURST) + 5, seconds=60)
    for token in tokens:
        assert send(make_request(token, federation, *make_device_key()))["reason"] == ""
    numbers = [token.number for token in tokens]
    assert numbers == list(range(len(tokens)))
    approved = registry.approve(*numbers)
    assert list(registry.read().values()) == approved
    assert list(registry.read_public_keys()) == numbers
    with pytest.raises(LookupError, match="device 0: expected a key that waits"):
        registry.approve(0)
    assert [token.number for token in registry.issue_tokens(2, seconds=60)] == [25, 26]


@pytest.mark.parametrize(
    "header", ["junk", "{}", '{"versions":{"protocol":4}}', "[" * 4000, "[" * 9999]
)
def test_a_malformed_enrolment_is_refused_in_one_line(tmp_path, header):
    make_service(tmp_path)
    service = EnrolmentService(tmp_path / "keys", DeviceRegistry(tmp_path / "keys"))
    reason = json.loads(service.answer(header, "here"))["reason"]
    assert reason.startswith("expected")
    assert "\n" not in reason


def test_a_key_of_another_device_is_not_overwritten(tmp_path):
    make_keys(tmp_path / "keys")
    enrolment.enrol_local_device(tmp_path / "keys", 0, tmp_path / "key")
    before = (tmp_path / "key" / "key").read_bytes()
    token = DeviceRegistry(tmp_path / "keys").issue_token(1, seconds=60)
    with pytest.raises(FileExistsError, match="has the key of device 0, and the token is for"):
        enrol_device("127.0.0.1", 1, token, tmp_path / "key")
    assert (tmp_path / "key" / "key").read_bytes() == before


def test_refusals_are_errors_of_permission():
    assert issubclass(EnrolmentRefused, PermissionError)
