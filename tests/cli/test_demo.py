"""The demo: its small parts for real, and sentences that say no more than the records do."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace as replace_fields
from rich.console import Console
from tests.engine import small_runs

import pliant as pl
from pliant.analysis.summary import SummaryRow
from pliant.cli import main
from pliant.cli.demo import busy_core, command, kill, methods, split
from pliant.cli.demo.methods import LOSE, SEND, WAIT, MethodResult
from pliant.experiment.sweep import SweepRun, run_sweep
from pliant.nn.table_file import save_table


def make_table():
    net = pl.elastic(pl.models.digits_cnn(), torch.zeros(1, 1, 28, 28))
    return pl.uniform_table(net, rows=2)


def make_row(accuracy, *, megabytes, gigamacs, seconds, c3, **others):
    return SummaryRow(
        group=others.pop("group", (("method", "x"),)),
        seeds=1,
        accuracy=(accuracy, 0.0),
        trained_accuracy=None,
        rounds_to_target=None,
        seconds_to_target=None,
        seconds=seconds,
        gigamacs=gigamacs,
        megabytes=megabytes,
        utilisation=1.0,
        lost_share=0.0,
        best_accuracy=accuracy,
        local_accuracy=None,
        forward_gigamacs=None,
        total_gigamacs=None,
        paper_megabytes=None,
        c3=c3,
        **others,
    )


def test_ctrl_c_says_how_to_resume(monkeypatch, capsys, tmp_path):
    def interrupt(console, out, seed):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "_run_demo", interrupt)
    assert main(["demo", "--out", str(tmp_path / "demo")]) == 130
    assert capsys.readouterr().err == "pliant: interrupted; run the same command to resume\n"


def test_the_trade_off_is_described_with_its_costs():
    basic = make_row(0.98, megabytes=300.0, gigamacs=10.0, seconds=150.0, c3=0.83)
    ada = make_row(0.81, megabytes=30.0, gigamacs=30.0, seconds=15.0, c3=0.70)
    text = split.describe_trade_off(basic, ada)
    assert "10% of SL-basic's bytes" in text
    assert "10% of its time" in text
    assert "3.0 times as much" in text
    assert "17.0 points behind" in text
    assert text.endswith("prefers SL-basic here.")


def test_one_shot_learning_is_described_with_its_savings():
    basic = make_row(0.98, megabytes=300.0, gigamacs=10.0, seconds=150.0, c3=0.83)
    one_shot = make_row(0.97, megabytes=6.0, gigamacs=2.0, seconds=3.0, c3=0.95)
    text = split.describe_one_shot(basic, one_shot)
    assert "1.0 points behind SL-basic with 2.0% of its bytes and 2.0% of its time" in text
    assert "1.0 points ahead of SL-basic" in split.describe_one_shot(one_shot, basic)


def test_a_seed_at_which_adasplit_wins_is_described():
    basic = make_row(0.80, megabytes=300.0, gigamacs=10.0, seconds=150.0, c3=0.6)
    ada = make_row(0.81, megabytes=30.0, gigamacs=30.0, seconds=15.0, c3=0.7)
    text = split.describe_trade_off(basic, ada)
    assert "1.0 points ahead" in text
    assert text.endswith("prefers AdaSplit here.")


def test_without_matplotlib_the_demo_ends_without_a_report(monkeypatch, capsys, tmp_path):
    small_runs.run(folder=tmp_path / "methods" / "fedavg")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    command._write_report(Console(width=200), [tmp_path / "methods"], tmp_path / "report")
    assert "No report: matplotlib is not installed: run `pip install" in capsys.readouterr().out
    monkeypatch.undo()
    command._write_report(Console(width=200), [tmp_path / "methods"], tmp_path / "report")
    assert f"open {tmp_path / 'report' / 'index.html'}" in capsys.readouterr().out


def test_the_next_command_runs_the_file_of_the_tutorial(capsys, tmp_path):
    command._print_next_steps(Console(width=200), tmp_path)
    file = tmp_path / "first.toml"
    assert f"pliant run {file}\n" in capsys.readouterr().out
    tutorial = Path(__file__).parents[2] / "docs" / "tutorial.md"  # whose commands are run too
    assert f"```toml\n{file.read_text()}```" in tutorial.read_text()
    file.write_text("edited")
    command._print_next_steps(Console(width=200), tmp_path)
    assert file.read_text() == "edited"


def test_every_method_has_the_same_devices_data_and_virtual_time(tmp_path):
    path = tmp_path / "table.safetensors"
    save_table(path, make_table())
    runs = methods.make_runs(seed=3, table_path=path)
    experiments = [run.experiment for run in runs]
    for field in ("fleet", "data", "network", "seed", "seconds", "per_round", "evaluation"):
        assert len({str(getattr(experiment, field)) for experiment in experiments}) == 1, field
    rules = {(dict(run.group)["method"], run.experiment.rules.late) for run in runs}
    names = {name for name, _ in rules}
    assert "progressive" in names
    assert rules == {(n, late) for n in names for late in ("partial", "discard")} | {
        ("FedAvg", "wait")
    }


def test_methods_are_compared_at_equal_virtual_time():
    group = ("method", "a"), ("late", SEND)
    row = make_row(0.95, megabytes=1.0, gigamacs=1.0, seconds=21.0, c3=0.5, group=group)
    [result] = methods.read_results([row])
    assert result == MethodResult("a", SEND, 0.95, None, 1.0)
    [result] = methods.read_results([replace(row, equal_seconds=20.0, equal_accuracy=0.93)])
    assert result.accuracy == 0.93
    [result] = methods.read_results([replace(row, equal_seconds=20.0, equal_accuracy=None)])
    assert result.accuracy is None  # it was not evaluated by then


RESULTS = [
    MethodResult("FedAvg", WAIT, 0.91, 16.6, 1.0),
    MethodResult("FedAvg", SEND, 0.95, 10.3, 1.0),
    MethodResult("narrow", SEND, 0.96, 4.1, 1.0),
    MethodResult("FedAvg", LOSE, 0.10, None, 0.0),
    MethodResult("narrow", LOSE, 0.95, 9.0, 0.93),
]


def test_the_first_method_and_what_arrives_are_named():
    assert methods.describe_results(RESULTS) == (
        "narrow reaches 90% first, after 4.1 s; FedAvg needs 10.3 s if late devices send what they "
        "have; FedAvg needs 16.6 s if it waits for them. If late work is lost, 0% of FedAvg's and "
        "93% of narrow's updates arrive."
    )


def test_ties_defeats_and_failures_are_named_as_they_are():
    slower = [replace(r, seconds=12.0) if r.method == "narrow" else r for r in RESULTS]
    text = methods.describe_results(slower)
    assert text.startswith(
        "FedAvg reaches 90% first, after 10.3 s; FedAvg needs 16.6 s if it waits"
    )
    equal = [replace(r, seconds=10.3) if r.rule == SEND else r for r in RESULTS]
    assert methods.describe_results(equal).startswith("FedAvg and narrow reach 90% first")
    never = [replace(result, seconds=None) for result in RESULTS]
    assert methods.describe_results(never).startswith("No method reached 90% in 12 s.")


def test_the_table_has_a_row_per_method(capsys):
    Console(width=100).print(methods.make_table(RESULTS))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["FedAvg", "95.0%", "10.3", "s", "10.0%", "never"] in lines
    assert ["narrow", "96.0%", "4.1", "s", "95.0%", "9.0", "s"] in lines
    assert ["FedAvg,", "waits", "91.0%", "16.6", "s"] in lines


def test_a_slowed_device_is_described_by_what_it_delivered():
    device = busy_core.SlowedDevice(
        2.0, 1.7, {"FedAvg": 0, "DISTREAL": 2}, {"FedAvg": 1.0, "DISTREAL": 0.6}
    )
    text = busy_core.describe_slowed_device(device)
    assert "FedAvg delivered 0 of 2 updates in time, DISTREAL 2 of 2: it measures" in text
    assert "to 60% of the compute" in text
    equal = replace(device, delivered={"FedAvg": 1, "DISTREAL": 1})
    assert busy_core.describe_slowed_device(equal).endswith(
        "1 of 2 updates in time, DISTREAL 1 of 2."
    )


def test_a_killed_run_is_described_by_both_digests():
    run = kill.KilledRun("pliant run --resume x", 12, 20, "ab", "ab")
    text = kill.describe_killed_run(run)
    assert text.startswith("Killed after 12 of 20 rounds, resumed by `pliant run --resume x`.")
    assert text.endswith("The same network, bit for bit.")
    assert "They differ" in kill.describe_killed_run(replace(run, digest="cd"))
    ended = kill.describe_killed_run(replace(run, rounds_before=20))
    assert ended.startswith("It ended before the kill")


@pytest.mark.waits
def test_a_run_is_killed_and_resumed_to_the_same_network(monkeypatch, tmp_path):
    path = tmp_path / "table.safetensors"
    save_table(path, make_table())
    full = methods.make_runs(0, path)[1]
    small = replace_fields(
        full.experiment,
        seconds=3.0,
        per_round=2,
        data=replace_fields(full.experiment.data, proxy=7900),
    )
    run = SweepRun(full.axis_values, small)
    run_sweep([run], tmp_path / "methods", pl.InlineWorkers())
    monkeypatch.setattr(kill, "KILL_AFTER", 1)
    killed = kill.run_killed(run, tmp_path / "methods" / run.name, tmp_path / "killed")
    assert killed.rounds == 3
    assert killed.digest == killed.undisturbed != ""


@pytest.mark.waits
@pytest.mark.skipif(not busy_core.can_pin(), reason="cannot keep a process on one core")
def test_a_real_device_is_slowed_down(monkeypatch, tmp_path):
    monkeypatch.setattr(busy_core, "IMAGES", 128)
    monkeypatch.setattr(busy_core, "EPOCHS", 2)
    monkeypatch.setattr(busy_core, "ROUNDS", 1)
    before = os.sched_getaffinity(0)
    device = busy_core.run_slowed_device(tmp_path / "device", seed=0)
    assert set(device.delivered) == {"FedAvg", "DISTREAL"}  # how many depends on the machine
    assert 0.0 < device.full_seconds < device.round_seconds
    starts = (tmp_path / "device" / "busy.log").read_text().count("\n")
    assert starts <= 2  # fewer if the machine does not let the busy program start in time
    assert os.sched_getaffinity(0) == before
