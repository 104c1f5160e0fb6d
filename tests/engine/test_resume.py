import json
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
import small
from small import FLEET, SETTING, Remembering, run

from pliant import checkpoint
from pliant.engine.simulate import simulate
from pliant.params import params_of

SCRIPTS = Path(__file__).parents[2] / "scripts"
METHOD = Remembering()


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calm") / "run"
    return run(METHOD, folder=folder)[-1].digest, (folder / "events.jsonl").read_bytes()


def broken_off(folder, rounds):
    """Run some rounds and no more, as if killed: nothing is saved on the way out."""
    records = simulate(METHOD, small.network(), small.data(), FLEET, setting=SETTING, folder=folder)
    list(islice(records, rounds))
    records.close()


def ending(folder):
    run(METHOD, folder=folder)
    events = (folder / "events.jsonl").read_bytes()
    return json.loads(events.splitlines()[-1])["digest"], events


@pytest.mark.parametrize("rounds", [1, 2, 3, 5, 6])
def test_a_run_broken_off_anywhere_comes_to_the_same_bits(calm, rounds, tmp_path):
    broken_off(tmp_path, rounds)
    assert ending(tmp_path) == calm


def test_a_line_that_was_cut_short_is_written_again(calm, tmp_path):
    broken_off(tmp_path, 3)
    with open(tmp_path / "events.jsonl", "ab") as file:
        file.write(b'{"type":"task","round":3,"dev')
    assert ending(tmp_path) == calm


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(calm, tmp_path):
    broken_off(tmp_path, 5)
    newest = max((tmp_path / "checkpoints").glob("*.ckpt"))
    newest.write_bytes(newest.read_bytes()[:-9])
    assert ending(tmp_path) == calm


def test_records_that_are_gone_are_told(tmp_path):
    broken_off(tmp_path, 3)
    (tmp_path / "events.jsonl").write_bytes(b"")
    with pytest.raises(ValueError, match=r"events.jsonl: expected at least \d+ bytes, got 0"):
        run(METHOD, folder=tmp_path)


@pytest.mark.parametrize("part", ["params", "extra", "memory"])
def test_without_some_part_of_the_state_the_result_differs(calm, part, tmp_path):
    broken_off(tmp_path, 3)
    found = checkpoint.newest(tmp_path / "checkpoints")
    number, tensors, state = found
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(f"{part}/")}
    assert len(kept) < len(tensors)
    if part == "params":
        first = params_of(small.network())
        kept |= {f"params/{name}": tensor for name, tensor in first.items()}
    checkpoint.save(tmp_path / "checkpoints", number, kept, state)
    digest, _ = ending(tmp_path)
    assert digest != calm[0]


@pytest.mark.parametrize(("runs", "kills"), [("federated", 10), ("split", 5)])
def test_kills_change_nothing(runs, kills):
    command = [sys.executable, SCRIPTS / "kill_resume.py", "--fork", "--runs", runs]
    command += ["--kills", str(kills)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (answer.returncode, answer.stderr) == (0, "")
    assert answer.stdout.startswith(f"{kills} kills (")
    assert "one SHA-256" in answer.stdout
    assert answer.stdout.endswith("; another where state is not restored\n")
