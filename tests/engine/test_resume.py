import json
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.engine.small_runs import (
    FEDAVG,
    FLEET,
    SETTINGS,
    StatefulFedAvg,
    data,
    images,
    network,
    run,
)
from tests.waiting import LIMIT

from pliant.data import Iid
from pliant.data.federated import TrainTestData
from pliant.engine.round_rules import RoundRules
from pliant.engine.simulate import simulate
from pliant.methods import FedAvg, LocalTraining, LrSchedule
from pliant.nn.models import digits_cnn
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


def read_files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def make_wide_network():
    return digits_cnn(5, filters=(4, 8), hidden=16, side=16)


def make_darker_data():
    darker = images(320)
    darker.pixels[7, 0, 5, 5] -= 1
    return TrainTestData(darker, images(60, seed=1)).share(Iid(), 12, proxy=20)


OTHER_INPUTS = {
    "method.type": {"method": FEDAVG},
    "method.local.batch": {"method": StatefulFedAvg(LocalTraining(batch=16))},
    "network": {"net": make_wide_network},
    "data.train": {"data": make_darker_data},
    "data.partition": {"data": lambda: data(devices=11)},
    "fleet.speed.low": {"fleet": replace(FLEET, speed=replace(FLEET.speed, low=0.5))},
    "settings.seed": {"settings": replace(SETTINGS, seed=1)},
    "settings.rules.late": {"settings": replace(SETTINGS, rules=RoundRules(dropout=0.1))},
}


@pytest.mark.parametrize("rounds", [1, 6])  # before the first checkpoint, and finished
@pytest.mark.parametrize("key", OTHER_INPUTS)
def test_a_run_with_other_inputs_is_not_resumed(key, rounds, tmp_path):
    run_interrupted(tmp_path, rounds)
    before, other = read_files(tmp_path), OTHER_INPUTS[key]
    records = simulate(
        other.get("method", METHOD),
        other.get("net", network)(),
        other.get("data", data)(),
        other.get("fleet", FLEET),
        settings=other.get("settings", SETTINGS),
        folder=tmp_path,
    )
    with pytest.raises(ValueError, match=rf"holds a run with {key} = \S+, not [^\n]+$"):
        next(records)
    assert read_files(tmp_path) == before


def test_other_initial_weights_do_not_matter_once_there_is_a_checkpoint(uninterrupted, tmp_path):
    run_interrupted(tmp_path, 3)
    net = network()
    net.load_state_dict({name: 2 * tensor for name, tensor in net.state_dict().items()})
    *_, last = simulate(METHOD, net, data(), FLEET, settings=SETTINGS, folder=tmp_path)
    assert last.digest == uninterrupted[0]


def test_a_checkpoint_without_its_inputs_is_not_resumed(tmp_path):
    run_interrupted(tmp_path, 3)
    (tmp_path / "inputs.json").unlink()
    with pytest.raises(
        ValueError, match=r"expected inputs.json beside the checkpoints, found none"
    ):
        run(METHOD, folder=tmp_path)


@pytest.mark.parametrize("rounds", [3, 4])  # interrupted and finished
def test_a_longer_run_ends_as_if_it_had_been_long_from_the_start(uninterrupted, rounds, tmp_path):
    short = replace(SETTINGS, rounds=4)
    records = simulate(METHOD, network(), data(), FLEET, settings=short, folder=tmp_path)
    list(islice(records, rounds))
    records.close()
    assert run(METHOD, folder=tmp_path)[-1].digest == uninterrupted[0]
    assert json.loads((tmp_path / "config.json").read_bytes())["rounds"] == 6
    before = read_files(tmp_path)
    with pytest.raises(ValueError, match="rounds = 6, not 4: a run can only become longer"):
        run(METHOD, folder=tmp_path, settings=short)
    assert read_files(tmp_path) == before


def test_a_run_whose_learning_rate_depends_on_the_rounds_keeps_their_number(tmp_path):
    method = FedAvg(LocalTraining(batch=8, schedule=LrSchedule("cosine")))
    run(method, folder=tmp_path, settings=replace(SETTINGS, rounds=2))
    before = read_files(tmp_path)
    message = "rounds = 2, not 6: method.local.schedule.kind = cosine depends on it"
    with pytest.raises(ValueError, match=message):
        run(method, folder=tmp_path)
    assert read_files(tmp_path) == before


@pytest.mark.waits
@pytest.mark.parametrize("kind", ["federated", pytest.param("split", marks=pytest.mark.slow)])
def test_kills_change_nothing(kind):
    kills = 5  # so that each kill point has its turn
    command = [sys.executable, SCRIPTS / "kill_resume.py", "--fork", "--kills", str(kills)]
    command += ["--runs", kind]
    process = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert (process.returncode, process.stderr) == (0, "")
    [line] = process.stdout.splitlines()
    assert line.startswith(f"{kills} kills (")
    assert "one SHA-256" in line
    assert line.endswith("; another SHA-256 from a changed checkpoint")
