"""The files in packaging/ are well-formed, and their commands exist."""

import configparser
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from tests.waiting import LIMIT

from pliant import cli

FOLDER = Path(__file__).parents[1] / "packaging"
UNITS = sorted((FOLDER / "systemd").glob("*.service"))


def read_unit(path):
    parser = configparser.ConfigParser(strict=True)
    parser.optionxform = str
    parser.read(path)
    return parser


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_a_unit_runs_a_command_of_ours_without_rights(path, capsys):
    service = read_unit(path)["Service"]
    program, *words = shlex.split(service["ExecStart"])
    assert program.endswith("/bin/pliant")
    assert words == [path.stem.removeprefix("pliant-"), "--config", "pliant.toml"]
    assert service["User"] == "pliant"
    assert service["NoNewPrivileges"] == "yes"
    assert service["KillMode"] == "mixed"  # children belong to the supervisor


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_systemd_accepts_a_unit(path, tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    text = path.read_text().replace("/opt/pliant/.venv/bin/pliant", "/bin/true")
    (tmp_path / path.name).write_text(text.replace("User=pliant\n", ""))
    command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / path.name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    ours = [line for line in done.stderr.splitlines() if path.name in line]
    assert ours == []


def test_the_options_file_has_only_options_of_its_commands(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    config = str(FOLDER / "pliant.toml")
    assert set(tomllib.loads((FOLDER / "pliant.toml").read_text())) == {"server", "device"}
    for name, missing in (("server", "experiment.toml"), ("device", "data")):
        assert cli.main([name, "--config", config]) == 2
        error = capsys.readouterr().err
        assert missing in error  # the first thing that is missing is a file, not an option
        assert error.count("\n") == 1


def test_compose_publishes_metrics_on_loopback_only_and_drops_rights():
    yaml = pytest.importorskip("yaml")
    services = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
    assert services["server"]["ports"] == ["9092:9092", "127.0.0.1:9093:9093"]
    for name, service in services.items():
        assert service["command"][:3] == [name, "--config", "pliant.toml"]
        assert service["cap_drop"] == ["ALL"]
        assert service["read_only"] is True
        assert (FOLDER / service["build"]["context"] / service["build"]["dockerfile"]).exists()


def test_the_image_copies_what_exists_and_does_not_run_as_root():
    lines = (FOLDER / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    steps = [line.split() for line in lines if line and not line.startswith("#")]
    copied = [source for name, *words in steps if name == "COPY" for source in words[:-1]]
    assert all((FOLDER.parent / source).exists() for source in copied)
    names = [step[0] for step in steps]
    assert names[0] == "FROM"
    assert ":" in steps[0][1]
    assert not {"ADD", "MAINTAINER"} & set(names)
    last_user = next(step[1] for step in reversed(steps) if step[0] == "USER")
    assert last_user == "10001:10001"  # a number, which an orchestrator can tell from root
    assert names.index("USER") < names.index("ENTRYPOINT")
