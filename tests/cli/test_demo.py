"""The demo's words: what it says when it is stopped, and what AdaSplit cost and saved."""

from pliant.cli import demo, main
from pliant.compare import Row


def row(accuracy, *, megabytes, gigamacs, seconds, c3):
    return Row(
        group=(("method", "x"),),
        seeds=1,
        accuracy=(accuracy, 0.0),
        narrow=None,
        rounds_to=None,
        seconds_to=None,
        seconds=seconds,
        gigamacs=gigamacs,
        megabytes=megabytes,
        utilisation=1.0,
        lost=0.0,
        best=accuracy,
        local=None,
        forward=None,
        total=None,
        paper_megabytes=None,
        c3=c3,
    )


def test_ctrl_c_says_how_to_go_on(monkeypatch, capsys, tmp_path):
    def stopped(console, out, seed):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "_shown", stopped)
    assert main(["demo", "--out", str(tmp_path / "demo")]) == 130
    assert capsys.readouterr().err == "pliant: interrupted; the same command goes on from here\n"


def test_a_trade_is_told_with_what_it_costs():
    basic = row(0.98, megabytes=300.0, gigamacs=10.0, seconds=150.0, c3=0.83)
    ada = row(0.81, megabytes=30.0, gigamacs=30.0, seconds=15.0, c3=0.70)
    told = demo._trade(basic, ada)
    assert "10% of SL-basic's bytes" in told
    assert "10% of its time" in told
    assert "3.0 times as much" in told
    assert "17.0 points behind" in told
    assert told.endswith("prefers SL-basic here.")


def test_a_seed_at_which_it_wins_is_told_so():
    basic = row(0.80, megabytes=300.0, gigamacs=10.0, seconds=150.0, c3=0.6)
    ada = row(0.81, megabytes=30.0, gigamacs=30.0, seconds=15.0, c3=0.7)
    told = demo._trade(basic, ada)
    assert "1.0 points ahead" in told
    assert told.endswith("prefers AdaSplit here.")
