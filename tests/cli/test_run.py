import json
import os
import re
import signal
import subprocess
import sys

import pytest
from tests.suspended import start_suspended, wait_until_suspended
from tests.waiting import LIMIT

from pliant import cli

SPEC = """
rounds = 8
per_round = 3
checkpoint_every = 3
workers = { type = "inline" }

[method]
type = "distreal"
local = { batch = 10 }

[fleet]
size = 200
speed = { type = "changing" }

[network]
options = { hidden = 16 }

[evaluation]
every = 4
"""
MOUNT = "mount -t tmpfs -o size=400k none"


def read_events(run_folder):
    return (run_folder / "events.jsonl").read_bytes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    (folder / "small.toml").write_text(SPEC)
    return folder


@pytest.fixture(scope="module")
def undisturbed(folder):
    """Return the records of an uninterrupted run."""
    run_folder = folder / "undisturbed"
    assert cli.main(["run", str(folder / "small.toml"), "--out", str(run_folder)]) == 0
    return read_events(run_folder)


@pytest.fixture
def run(capsys):
    def run(*arguments):
        capsys.readouterr()
        code = cli.main(["run", *map(str, arguments)])
        return code, *capsys.readouterr()

    return run


def test_a_run_prints_one_line_per_round_and_fills_its_folder(run, folder, undisturbed, tmp_path):
    code, output, errors = run(folder / "small.toml", "rounds=2", "--out", tmp_path / "run")
    assert (code, errors) == (0, "")
    first, *rounds, summary, hint = output.splitlines()
    assert first == f"writing to {tmp_path / 'run'}"
    assert [line.split()[1] for line in rounds] == ["1/2", "2/2"]
    assert re.match(r"finished 2 rounds, [\d.]+ s of virtual time: [\d.]+ GMACs, ", summary)
    assert "accuracy" in summary
    assert hint == f"next: pliant report {tmp_path / 'run'}"
    names = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert names == [
        "checkpoints",
        "config.json",
        "events.jsonl",
        "inputs.json",
        "lock",
        "versions.json",
    ]
    assert json.loads((tmp_path / "run/config.json").read_bytes())["rounds"] == 2


def test_json_output_is_one_record_per_round(run, folder, undisturbed, tmp_path):
    code, output, _ = run(folder / "small.toml", "--out", tmp_path / "run", "--json")
    records = [json.loads(line) for line in output.splitlines()]
    assert code == 0
    assert [record["round"] for record in records] == list(range(8))
    assert records[-1]["digest"] == json.loads(undisturbed.splitlines()[-1])["digest"]
    assert read_events(tmp_path / "run") == undisturbed


def test_the_folder_is_named_after_the_file(run, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(folder / "small.toml", "rounds=1")[0] == 0
    assert (tmp_path / "runs/small/events.jsonl").is_file()


def test_resuming_a_finished_run_does_nothing(run, folder, undisturbed):
    code, output, errors = run("--resume", folder / "undisturbed")
    assert (code, errors) == (0, "")
    assert [line.split()[0] for line in output.splitlines()] == ["finished", "next:"]
    assert read_events(folder / "undisturbed") == undisturbed


def test_a_finished_run_can_get_more_rounds(run, folder, undisturbed, tmp_path):
    run_folder = tmp_path / "run"
    assert run(folder / "small.toml", "rounds=2", "--out", run_folder)[0] == 0
    code, output, _ = run("--resume", run_folder, "rounds=8", "seed=0", "--json")
    assert code == 0
    records = [json.loads(line) for line in output.splitlines()]
    assert [record["round"] for record in records] == list(range(2, 8))
    assert records[-1]["digest"] == json.loads(undisturbed.splitlines()[-1])["digest"]
    assert run("--resume", run_folder, "--json") == (0, "", "")


def test_a_run_on_changed_images_is_not_resumed(run, folder, tmp_path):
    source = "import torch, pliant as pl\ndef load():\n    images = pl.ImageDataset.from_tensors("
    source += "torch.full((800, 1, 28, 28), {}), torch.arange(800) % 10)\n"
    source += "    return pl.data.TrainTestData(images, images)\n"
    (tmp_path / "own.py").write_text(source.format(0.25))
    words = [f"data.name={tmp_path / 'own.py'}:load", "rounds=1", "--out", tmp_path / "run"]
    assert run(folder / "small.toml", *words)[0] == 0
    (tmp_path / "own.py").write_text(source.format(0.5))
    script = "import sys; from pliant.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", script, "run", "--resume", tmp_path / "run", "rounds=2"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert process.returncode == 2
    assert "holds a run with data.train = " in process.stderr


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([], "Expected either a TOML file or --resume FOLDER"),
        (
            ["small.toml", "--resume", "undisturbed"],
            "Expected either a TOML file or --resume FOLDER",
        ),
        (["--resume", "undisturbed", "rounds=7"], "rounds = 8, not 7: a run can only become"),
        (
            ["--resume", "undisturbed", "rounds=9", "seed=1"],
            "undisturbed holds a run with seed = 0",
        ),
        (["--resume", "undisturbed", "rouns=9"], "unknown key `rouns`; did you mean 'rounds'?"),
        (
            ["small.toml", "--out", "undisturbed"],
            "already holds a run: resume it with `pliant run --resume ",
        ),
        (["--resume", "none"], "none: expected a run folder, found no config.json"),
        (["none.toml"], "none.toml: expected a file or folder, found none"),
        (["small.toml", "rounds=0", "--out", "new"], "small.toml: Expected `int` >= 1"),
        (
            ["small.toml", "rouns=1", "--out", "new"],
            "small.toml: unknown key `rouns`; did you mean 'rounds'?",
        ),
        (["small.toml", "network.name=x", "--out", "new"], "unknown network 'x'"),
        (["small.toml", "fleet.size=9999", "--out", "new"], "Expected at most"),
        (["wrong.toml", "--out", "new"], "wrong.toml: "),
    ],
)
def test_wrong_input_is_a_one_line_error_and_leaves_no_folder(
    run, folder, undisturbed, arguments, part, monkeypatch
):
    monkeypatch.chdir(folder)
    (folder / "wrong.toml").write_text("rounds = = 3")
    code, output, errors = run(*arguments)
    assert (code, output) == (2, "")
    assert part in errors
    assert errors.startswith("pliant: ")
    assert errors.count("\n") == 1
    assert not (folder / "new").exists()
    assert read_events(folder / "undisturbed") == undisturbed


@pytest.mark.skipif(os.name == "nt", reason="Windows cannot send Ctrl-C to one process")
def test_ctrl_c_stops_after_the_round_and_says_how_to_resume(run, folder, undisturbed, tmp_path):
    run_folder = tmp_path / "run"
    words = ["run", folder / "small.toml", "--out", run_folder]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with start_suspended([2], *words, **pipes) as process:
        wait_until_suspended(process)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGCONT)
        output, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 130
    assert errors == (
        "stopping after this round (press Ctrl-C again to stop at once)\n"
        f"stopped; resume with `pliant run --resume {run_folder}`\n"
    )
    assert output.count("\n") == 4  # where the run is written, and three rounds
    newest = max(path.name for path in (run_folder / "checkpoints").iterdir())
    assert newest == "00000003.ckpt"

    assert run("--resume", run_folder)[0] == 0
    assert read_events(run_folder) == undisturbed


def test_a_second_ctrl_c_stops_during_a_round(run, folder, undisturbed, tmp_path, monkeypatch):
    from pliant.workers import pool

    run_folder = tmp_path / "run"
    stream_jobs, calls = pool.Pool.stream, []

    def interrupt(self, *arguments, **options):
        calls.append(1)
        if len(calls) == 5:  # rounds 4 and 5 come after the checkpoint of round 3
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        return stream_jobs(self, *arguments, **options)

    monkeypatch.setattr(pool.Pool, "stream", interrupt)
    code, _, errors = run(folder / "small.toml", "--out", run_folder)
    assert code == 130
    assert errors == (
        "stopping after this round (press Ctrl-C again to stop at once)\n"
        f"interrupted; resume with `pliant run --resume {run_folder}`\n"
    )
    assert [path.name for path in (run_folder / "checkpoints").iterdir()] == ["00000003.ckpt"]
    assert run("--resume", run_folder)[0] == 0
    assert read_events(run_folder) == undisturbed
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.fixture
def tiny_disk(tmp_path):
    """Mount a real file system of 400 KB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    process = subprocess.run([*MOUNT.split(), disk], capture_output=True, check=False)
    if process.returncode:
        pytest.skip("mounting a small disk needs root on Linux")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


def fill_disk(path, leave):
    """Fill the disk, leaving some bytes free."""
    disk = os.statvfs(path.parent)
    path.write_bytes(bytes(max(0, disk.f_bavail * disk.f_frsize - leave)))


@pytest.mark.skipif(os.name == "nt", reason="Windows has no tmpfs")
def test_a_full_disk_is_a_one_line_error_and_the_run_can_be_resumed(
    run, folder, undisturbed, tiny_disk
):
    run_folder, ballast = tiny_disk / "run", tiny_disk / "ballast"
    size = (folder / "undisturbed/checkpoints/00000006.ckpt").stat().st_size
    fill_disk(ballast, 2 * size + len(undisturbed) // 2)  # two checkpoints fit, a third does not
    code, _, errors = run(folder / "small.toml", "--out", run_folder)
    assert code == 1
    assert errors.startswith("pliant: the disk is full")
    assert errors.endswith(
        f"; free some space and resume with `pliant run --resume {run_folder}`\n"
    )
    assert errors.count("\n") == 1
    names = [path.name for path in (run_folder / "checkpoints").iterdir()]
    assert names
    assert all(name.endswith(".ckpt") for name in names)
    code, _, errors = run("--resume", run_folder)
    assert code == 1
    assert errors.count("\n") == 1
    ballast.unlink()
    assert run("--resume", run_folder)[0] == 0
    assert read_events(run_folder) == undisturbed


def test_a_run_on_real_devices_cannot_be_resumed_as_a_simulation(folder, run, tmp_path):
    run_folder = tmp_path / "live"
    from pliant.experiment.config import load_experiment, start_run

    start_run(run_folder, load_experiment(folder / "small.toml"))
    (run_folder / "settings.json").write_text("{}")
    before = sorted(run_folder.iterdir())
    code, _, errors = run("--resume", run_folder)
    assert code == 2
    assert (
        errors == f"pliant: {run_folder} is a run on real devices: resume it with `pliant server`\n"
    )
    assert sorted(run_folder.iterdir()) == before
