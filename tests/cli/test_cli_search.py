import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from pliant import cli
from pliant.engine.trials import NAME, read_trials
from pliant.explore import load_table

SPEC = """
workers = { type = "inline" }
[data]
proxy = 200
[search]
by = { type = "fast", least = 6, rounds = 1, refined = 3, vectors = 3 }
profile = "profile.json"
normalisers = 2
fresh = 1
rows = 4
[search.objective]
batches = 2
batch = 8
seeds = 1
snapshot_batches = 2
evaluated = 40
"""
PROFILE = '{"start": 0.001, "per_mac": 1e-11, "per_byte": 1e-9, "batch": 32}'
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "search_axes.py"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("searches")
    (place / "small.toml").write_text(SPEC)
    (place / "profile.json").write_text(PROFILE)
    assert run(place, "macs") == 0
    return place


def run(place, out, *more):
    spec, folder = str(place / "small.toml"), str(place / out)
    return cli.main(["search", spec, *more, "--out", folder, "--no-pictures", "--json"])


def test_a_search_by_seconds_trains_only_what_the_one_by_macs_has_not(place):
    known = {(line.rates, line.seed) for line in read_trials(place / "macs" / NAME)}
    assert run(place, "alone", "search.cost=seconds") == 0
    assert run(place, "borrowed", "search.cost=seconds", "--records", str(place / "macs")) == 0
    alone = {(line.rates, line.seed) for line in read_trials(place / "alone" / NAME)}
    both = {(line.rates, line.seed) for line in read_trials(place / "borrowed" / NAME)}
    assert both == known | alone
    assert len(known & alone) >= 4 + 6  # the corners and the first design
    tables = [place / name / "table.safetensors" for name in ("alone", "borrowed")]
    assert load_table(tables[0]) == load_table(tables[1])


def test_the_rates_of_two_axes_are_told_site_by_site(place):
    pytest.importorskip("matplotlib")
    assert run(place, "seconds", "search.cost=seconds", "--records", str(place / "macs")) == 0
    picture = place / "axes.png"
    folders = [str(place / "macs"), str(place / "seconds")]
    command = [sys.executable, str(SCRIPT), *folders, "--picture", str(picture)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.count("% of the full step's time") == 3
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_folder_without_records_is_told_and_nothing_is_written(place, capsys):
    assert run(place, "new", "--records", str(place / "nowhere")) != 0
    assert "nowhere" in capsys.readouterr().err
    assert not (place / "new").exists()


def test_a_folder_of_another_search_is_refused(place, capsys):
    assert run(place, "macs", "search.seed=1") != 0
    assert "holds another search" in capsys.readouterr().err


def test_a_search_from_before_a_field_was_there_goes_on(place):
    config = place / "macs" / "config.json"
    asked = msgspec.json.decode(config.read_bytes())
    del asked["data"]["proxy_seed"]
    config.write_bytes(msgspec.json.encode(asked))
    assert run(place, "macs") == 0


def test_the_help_tells_how_to_search_by_seconds(capsys):
    assert cli.main(["search", "--help"]) == 0
    told = capsys.readouterr().out
    assert "search.cost=seconds" in told
    assert "--records" in told
