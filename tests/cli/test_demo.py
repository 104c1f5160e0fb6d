"""What the demo prints when it is interrupted, without the report's extra, and about AdaSplit."""

import sys

from rich.console import Console
from tests.engine import small_runs

from pliant.analysis.summary import SummaryRow
from pliant.cli import demo, main


def make_row(accuracy, *, megabytes, gigamacs, seconds, c3):
    return SummaryRow(
        group=(("method", "x"),),
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
    )


def test_ctrl_c_says_how_to_resume(monkeypatch, capsys, tmp_path):
    def interrupt(console, out, seed):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "_run_demo", interrupt)
    assert main(["demo", "--out", str(tmp_path / "demo")]) == 130
    assert capsys.readouterr().err == "pliant: interrupted; run the same command to resume\n"


def test_the_trade_off_is_described_with_its_costs():
    basic = make_row(0.98, megabytes=300.0, gigamacs=10.0, seconds=150.0, c3=0.83)
    ada = make_row(0.81, megabytes=30.0, gigamacs=30.0, seconds=15.0, c3=0.70)
    text = demo._describe_trade_off(basic, ada)
    assert "10% of SL-basic's bytes" in text
    assert "10% of its time" in text
    assert "3.0 times as much" in text
    assert "17.0 points behind" in text
    assert text.endswith("prefers SL-basic here.")


def test_one_shot_learning_is_described_with_its_savings():
    basic = make_row(0.98, megabytes=300.0, gigamacs=10.0, seconds=150.0, c3=0.83)
    one_shot = make_row(0.97, megabytes=6.0, gigamacs=2.0, seconds=3.0, c3=0.95)
    text = demo._describe_one_shot(basic, one_shot)
    assert "1.0 points behind SL-basic with 2.0% of its bytes and 2.0% of its time" in text
    assert "1.0 points ahead of SL-basic" in demo._describe_one_shot(one_shot, basic)


def test_a_seed_at_which_adasplit_wins_is_described():
    basic = make_row(0.80, megabytes=300.0, gigamacs=10.0, seconds=150.0, c3=0.6)
    ada = make_row(0.81, megabytes=30.0, gigamacs=30.0, seconds=15.0, c3=0.7)
    text = demo._describe_trade_off(basic, ada)
    assert "1.0 points ahead" in text
    assert text.endswith("prefers AdaSplit here.")


def test_without_matplotlib_the_demo_ends_without_a_report(monkeypatch, capsys, tmp_path):
    small_runs.run(folder=tmp_path / "methods" / "fedavg")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    demo._write_report(Console(width=200), [tmp_path / "methods"], tmp_path / "report")
    assert "No report: matplotlib is not installed: run `pip install" in capsys.readouterr().out
    monkeypatch.undo()
    demo._write_report(Console(width=200), [tmp_path / "methods"], tmp_path / "report")
    assert "Report: " in capsys.readouterr().out
