import json
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
from tests.engine.small_runs import FLEET, SETTINGS, StatefulFedAvg, data, network, run

from pliant.engine.simulate import simulate
from pliant.params import get_params
from pliant.storage import checkpoint

SCRIPTS = Path(__file__).parents[2] / "scripts"
METHOD = StatefulFedAvg()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Return the digest and the records of a run that was never interrupted."""
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    return run(METHOD, folder=folder)[-1].digest, (folder / "events.jsonl").read_bytes()


def run_interrupted(folder, rounds):
    """Run some rounds as if then killed: nothing is saved at the end."""
    records = simulate(METHOD, network(), data(), FLEET, settings=SETTINGS, folder=folder)
    list(islice(records, rounds))
    records.close()


def resume(folder):
    run(METHOD, folder=folder)
    events = (folder / "events.jsonl").read_bytes()
    return json.loads(events.splitlines()[-1])["digest"], events


@pytest.mark.parametrize("rounds", [1, 2, 3, 5, 6])
def test_an_interrupted_run_gives_the_same_bits(uninterrupted, rounds, tmp_path):
    run_interrupted(tmp_path, rounds)
    assert resume(tmp_path) == uninterrupted


def test_a_truncated_record_is_written_again(uninterrupted, tmp_path):
    run_interrupted(tmp_path, 3)
    with open(tmp_path / "events.jsonl", "ab") as file:
        file.write(b'{"type":"task","round":3,"dev')
    assert resume(tmp_path) == uninterrupted


def test_a_damaged_checkpoint_is_skipped_for_the_previous_one(uninterrupted, tmp_path):
    run_interrupted(tmp_path, 5)
    newest = max((tmp_path / "checkpoints").glob("*.ckpt"))
    newest.write_bytes(newest.read_bytes()[:-9])
    assert resume(tmp_path) == uninterrupted


def test_missing_records_are_an_error(tmp_path):
    run_interrupted(tmp_path, 3)
    (tmp_path / "events.jsonl").write_bytes(b"")
    # 29 bytes are the header, written on opening
    with pytest.raises(ValueError, match=r"events.jsonl: expected at least \d+ bytes, got 29"):
        run(METHOD, folder=tmp_path)


@pytest.mark.parametrize("part", ["server/params", "server/momentum", "devices"])
def test_without_some_part_of_the_state_the_result_differs(uninterrupted, part, tmp_path):
    run_interrupted(tmp_path, 3)
    number, tensors, state = checkpoint.load_newest(tmp_path / "checkpoints")
    remaining = {
        name: tensor for name, tensor in tensors.items() if not name.startswith(f"{part}/")
    }
    assert len(remaining) < len(tensors)
    if part == "server/params":
        initial = get_params(network())
        remaining |= {f"{part}/{name}": tensor for name, tensor in initial.items()}
    checkpoint.save(tmp_path / "checkpoints", number, remaining, state)
    digest, _ = resume(tmp_path)
    assert digest != uninterrupted[0]


@pytest.mark.parametrize(("runs", "kills"), [("federated", 10), ("split", 5)])
def test_kills_change_nothing(runs, kills):
    command = [sys.executable, SCRIPTS / "kill_resume.py", "--fork", "--runs", runs]
    command += ["--kills", str(kills)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (process.returncode, process.stderr) == (0, "")
    assert process.stdout.startswith(f"{kills} kills (")
    assert "one SHA-256" in process.stdout
    assert process.stdout.endswith("; another SHA-256 from a changed checkpoint\n")
