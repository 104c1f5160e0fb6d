"""A dry run prints exactly what would leave a device."""

import numpy as np
import pytest
from tests.deploy.in_process import make_own_experiment, write_own_data

from pliant.cli import main
from pliant.deploy.device import agent as agent_module
from pliant.deploy.supervise import dry_run

SPEC = """
[method]
type = "{method}"
local = {{ batch = 16 }}
[network]
input = [1, 28, 28]
classes = 10
[fleet]
size = 3
round_seconds = 60.0
"""


@pytest.fixture
def folder(tmp_path):
    write_own_data(make_own_experiment(), tmp_path)
    (tmp_path / "own.toml").write_text(SPEC.format(method="scaffold"))
    return tmp_path


def run_dry(folder, *options):
    return main(["device", "--dry-run", str(folder / "own.toml"), "--number", "1", *options])


def test_every_message_is_printed_field_by_field(folder, capsys, monkeypatch):
    sent = []
    handle = agent_module.DeviceAgent.handle_request

    def record(agent, *arguments):
        sent.append(handle(agent, *arguments))
        return sent[-1]

    monkeypatch.setattr(dry_run.DeviceAgent, "handle_request", record)
    assert run_dry(folder, "--data", str(folder / "1")) == 0
    lines = capsys.readouterr().out.splitlines()
    kinds = [line for line in lines if not line.startswith(" ")]
    names = ("hello", "update", "score")
    assert kinds == [f"{n}: {len(raw):,} bytes" for n, raw in zip(names, sent, strict=True)]
    declared = '{"max_samples":67,"tests":20,"classes":[0,1,2,3,4,5,6,7,8,9]}'
    assert f"    declaration = {declared}" in lines
    assert "    num_samples = 67" in lines
    assert "    tests = 20" in lines
    # the change of the network, and SCAFFOLD's change of the control variate
    assert "    tensor change/features.0.weight float32 [12, 1, 5, 5]" in lines
    assert any(line.startswith("    tensor extra/") for line in lines)


def test_hidden_classes_are_not_printed(folder, capsys):
    options = ("--data", str(folder / "1"), "--classes", "hidden", "--max-samples", "40")
    assert run_dry(folder, *options) == 0
    output = capsys.readouterr().out
    assert '{"max_samples":40,"tests":20,"classes":null}' in output
    assert "    num_samples = 40" in output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "expected --data FOLDER or --dataset"),
        (("--data", "missing"), "Expected an existing folder for --data, got missing"),
        (("--data", "OWN", "--dataset", "a.py:b"), "Expected either --data or --dataset"),
        (("--data", "OWN", "--test-share", "1"), "< 1.0"),
        (("--data", "OWN", "--max-samples", "0"), ">= 1"),
        (("--data", "WIDE"), "expected images of shape (1, 28, 28), got (3, 3)"),
    ],
)
def test_wrong_data_are_refused_in_one_line(folder, capsys, options, message):
    (folder / "wide").mkdir()
    np.savez(folder / "wide" / "a.npz", images=np.zeros((4, 3, 3)), labels=np.zeros(4, int))
    paths = {"OWN": str(folder / "1"), "WIDE": str(folder / "wide")}
    assert run_dry(folder, *(paths.get(option, option) for option in options)) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line


def test_only_devices_with_their_own_data_have_a_dry_run(folder, capsys):
    text = (folder / "own.toml").read_text().replace("input = [1, 28, 28]\nclasses = 10\n", "")
    (folder / "own.toml").write_text(text)
    assert run_dry(folder, "--data", str(folder / "1")) == 2
    assert "Expected `input` and `classes` in [network], found neither" in capsys.readouterr().err


def test_a_folder_without_images_is_one_line(folder, capsys):
    (folder / "empty").mkdir()
    assert run_dry(folder, "--data", str(folder / "empty")) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert len(output.err.splitlines()) == 1


def test_every_frame_of_a_split_method_is_counted(folder, capsys, monkeypatch):
    sent = []

    def record(call):
        def run(device, *arguments):
            result = call(device, *arguments)
            sent.extend(result if isinstance(result, list) else [result])
            return result

        return run

    for name in ("configure", "handle_request"):
        monkeypatch.setattr(dry_run.SplitDevice, name, record(getattr(dry_run.SplitDevice, name)))
    spec = SPEC.format(method="splitfed").replace("[network]", 'cut = "features.2"\n[network]')
    (folder / "own.toml").write_text(spec + '[rules]\nlate = "wait"\n')
    assert run_dry(folder, "--data", str(folder / "1")) == 0
    lines = capsys.readouterr().out.splitlines()
    heads = [line for line in lines if not line.startswith(" ")]
    assert heads[0].startswith("1 x Ready: ")
    assert any(line.startswith("5 x body, labels: ") for line in heads)  # 67 samples in 5 batches
    counted = sum(int(line.split()[-2].replace(",", "")) for line in heads)
    assert counted == sum(map(len, sent[1:]))  # the first is a check before the round
    declared = '{"max_samples":67,"tests":20,"classes":[0,1,2,3,4,5,6,7,8,9]}'
    assert f"    declaration = {declared}" in lines
    assert str(folder) not in "".join(lines)
