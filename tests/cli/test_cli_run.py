import json
import os
import signal
import subprocess
import sys

import pytest

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


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("runs")
    (place / "small.toml").write_text(SPEC)
    return place


@pytest.fixture(scope="module")
def calm(place):
    """What a run that is left alone comes to."""
    folder = place / "calm"
    assert cli.main(["run", str(place / "small.toml"), "--out", str(folder)]) == 0
    return (folder / "events.jsonl").read_bytes()


@pytest.fixture
def run(capsys):
    def run(*arguments):
        capsys.readouterr()
        code = cli.main(["run", *map(str, arguments)])
        return code, *capsys.readouterr()

    return run


def events(folder):
    return (folder / "events.jsonl").read_bytes()


def test_a_run_shows_a_line_a_round_and_leaves_all_in_its_folder(run, place, calm, tmp_path):
    code, output, errors = run(place / "small.toml", "rounds=2", "--out", tmp_path / "run")
    assert (code, errors) == (0, "")
    lines = output.splitlines()
    assert [line.split()[1] for line in lines] == ["1/2", "2/2"]
    assert "accuracy" in lines[-1]
    names = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert names == ["checkpoints", "config.json", "events.jsonl", "lock", "versions.json"]
    assert json.loads((tmp_path / "run/config.json").read_bytes())["rounds"] == 2


def test_json_is_a_record_a_round(run, place, calm, tmp_path):
    code, output, _ = run(place / "small.toml", "--out", tmp_path / "run", "--json")
    records = [json.loads(line) for line in output.splitlines()]
    assert code == 0
    assert [record["round"] for record in records] == list(range(8))
    assert records[-1]["digest"] == json.loads(calm.splitlines()[-1])["digest"]
    assert events(tmp_path / "run") == calm


def test_the_folder_is_named_after_the_file(run, place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(place / "small.toml", "rounds=1")[0] == 0
    assert (tmp_path / "runs/small/events.jsonl").is_file()


def test_a_finished_run_has_nothing_to_go_on_with(run, place, calm):
    assert run("--resume", place / "calm") == (0, "", "")
    assert events(place / "calm") == calm


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([], "Expected either a TOML file or --resume FOLDER"),
        (["small.toml", "--resume", "calm"], "Expected either a TOML file or --resume FOLDER"),
        (["--resume", "calm", "rounds=9"], "Expected no key=value with --resume"),
        (["--resume", "calm", "rounds=9", "seed=1"], "Expected no key=value with --resume"),
        (["small.toml", "--out", "calm"], "holds a run already: resume it or choose another"),
        (["--resume", "none"], "none: expected the folder of a run, found no config.json"),
        (["none.toml"], "No such file or directory: 'none.toml'"),
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
def test_wrong_input_is_one_line_and_leaves_no_folder(
    run, place, calm, arguments, part, monkeypatch
):
    monkeypatch.chdir(place)
    (place / "wrong.toml").write_text("rounds = = 3")
    code, output, errors = run(*arguments)
    assert (code, output) == (2, "")
    assert part in errors
    assert errors.startswith("pliant: ")
    assert errors.count("\n") == 1
    assert not (place / "new").exists()
    assert events(place / "calm") == calm


@pytest.mark.skipif(os.name == "nt", reason="Windows sends no Ctrl-C to one process")
def test_ctrl_c_ends_after_the_round_and_says_how_to_go_on(run, place, calm, tmp_path):
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "pliant", "run", place / "small.toml", "--out", folder]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == (
        "stopping after this round (Ctrl-C again: at once)\n"
        f"stopped; go on with `pliant run --resume {folder}`\n"
    )
    done = 1 + output.count("\n")
    assert done < 8
    newest = max(path.name for path in (folder / "checkpoints").iterdir())
    assert newest == f"{done:08d}.ckpt"

    assert run("--resume", folder)[0] == 0
    assert events(folder) == calm


def test_a_second_ctrl_c_ends_in_the_middle_of_a_round(run, place, calm, tmp_path, monkeypatch):
    from pliant.engine import workers

    folder = tmp_path / "run"
    perform, jobs = workers._InlinePool.run, []

    def interrupted(self, *arguments, **options):
        jobs.append(1)
        if len(jobs) == 5:  # rounds 4 and 5 are behind the checkpoint of round 3
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        return perform(self, *arguments, **options)

    monkeypatch.setattr(workers._InlinePool, "run", interrupted)
    code, _, errors = run(place / "small.toml", "--out", folder)
    assert code == 130
    assert errors == (
        "stopping after this round (Ctrl-C again: at once)\n"
        f"interrupted; go on with `pliant run --resume {folder}`\n"
    )
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["00000003.ckpt"]
    assert run("--resume", folder)[0] == 0
    assert events(folder) == calm
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.fixture
def tiny_disk(tmp_path):
    """A file system with room for little: a real one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run([*MOUNT.split(), folder], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("mounting a small disk needs root on Linux")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def fill(path, leave):
    """Fill the disk but for some bytes."""
    room = os.statvfs(path.parent)
    path.write_bytes(bytes(max(0, room.f_bavail * room.f_frsize - leave)))


@pytest.mark.skipif(os.name == "nt", reason="Windows cannot mount memory")
def test_a_full_disk_is_one_line_and_the_run_goes_on_when_there_is_room(
    run, place, calm, tiny_disk
):
    folder, ballast = tiny_disk / "run", tiny_disk / "ballast"
    size = (place / "calm/checkpoints/00000006.ckpt").stat().st_size
    fill(ballast, 2 * size + len(calm) // 2)  # a third checkpoint does not fit beside two
    code, _, errors = run(place / "small.toml", "--out", folder)
    assert code == 1
    assert errors.startswith("pliant: [Errno 28] No space left on device")
    assert errors.endswith(f"; make room and go on with `pliant run --resume {folder}`\n")
    assert errors.count("\n") == 1
    names = [path.name for path in (folder / "checkpoints").iterdir()]
    assert names
    assert all(name.endswith(".ckpt") for name in names)
    again = run("--resume", folder)
    assert again[0] == 1
    assert again[2].count("\n") == 1
    ballast.unlink()
    assert run("--resume", folder)[0] == 0
    assert events(folder) == calm


def test_a_run_on_real_devices_does_not_go_on_as_a_simulation(place, run, tmp_path):
    folder = tmp_path / "live"
    from pliant.experiment import begin, load_experiment

    begin(folder, load_experiment(place / "small.toml"))
    (folder / "service.json").write_text("{}")
    before = sorted(folder.iterdir())
    code, _, told = run("--resume", folder)
    assert code == 2
    assert told == f"pliant: {folder} is a run on real devices: go on with `pliant server`\n"
    assert sorted(folder.iterdir()) == before
