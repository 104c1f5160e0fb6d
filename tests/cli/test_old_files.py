"""Files written by pliant 0.1 are refused in one line that says what to do, and are left alone."""

import shutil
import socket
from hashlib import sha256
from pathlib import Path

import pytest

from pliant.cli import main
from pliant.storage import checkpoint
from pliant.storage.formats import UnsupportedFormat

OLD_FILES = Path(__file__).parents[1] / "old_files"
SPEC = """
rounds = 2
per_round = 2

[method]
type = "distreal"
{table}

[fleet]
size = 100

[network]
name = "digits_cnn"
options = {{ hidden = 4 }}

[workers]
type = "inline"
"""
RUN_ADVICE = "of an older pliant; run the experiment again in a new folder"


@pytest.fixture
def old(tmp_path):
    shutil.copytree(OLD_FILES, tmp_path / "old")
    return tmp_path / "old"


def hash_tree(folder):
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder): sha256(path.read_bytes()).hexdigest() for path in files}


def run_refused(capsys, *words):
    assert main([str(word) for word in words]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    return error


@pytest.mark.parametrize(
    "words", [["run", "--resume", "RUN"], ["report", "RUN"], ["report", "OLD"], ["dash", "OLD"]]
)
def test_an_old_run_is_refused(old, capsys, words):
    before = hash_tree(old)
    paths = {"RUN": old / "run", "OLD": old}
    error = run_refused(capsys, *(paths.get(word, word) for word in words))
    assert f"{old / 'run' / 'config.json'}: expected a run of format 2, got format 1" in error
    assert RUN_ADVICE in error
    assert hash_tree(old) == before


def test_a_comparison_does_not_build_on_an_old_run(old, tmp_path, capsys):
    spec = tmp_path / "two.toml"
    spec.write_text(SPEC.format(table="") + "\n[matrix]\nseed = [0]\n")
    out = tmp_path / "out"
    assert main(["compare", str(spec), "--out", str(out)]) == 0
    capsys.readouterr()
    (member,) = [path.parent for path in out.rglob("config.json")]
    shutil.rmtree(member)
    shutil.copytree(old / "run", member)
    before = hash_tree(member)
    error = run_refused(capsys, "compare", spec, "--out", out)
    assert "of format 2, got format 1 of an older pliant" in error
    assert hash_tree(member) == before


def test_an_old_search_is_not_resumed(old, tmp_path, capsys):
    spec = tmp_path / "search.toml"
    spec.write_text('[network]\nname = "digits_cnn"\n[search]\nrows = 4\n')
    before = hash_tree(old)
    error = run_refused(capsys, "search", spec, "--out", old / "search")
    assert "expected a run of format 2, got format 1" in error
    assert hash_tree(old) == before


def test_an_old_table_is_refused(old, tmp_path, capsys):
    spec = tmp_path / "table.toml"
    spec.write_text(SPEC.format(table=f'table = "{old / "search" / "table.safetensors"}"'))
    error = run_refused(capsys, "run", spec, "--out", tmp_path / "run")
    assert "table.safetensors: expected a table of format 3, got format 1" in error
    assert "search again with `pliant search`" in error
    assert not (tmp_path / "run").exists()


def test_an_old_run_is_not_served(old, tmp_path, capsys):
    spec = tmp_path / "served.toml"
    spec.write_text(SPEC.format(table="").replace("distreal", "fedavg"))
    before = hash_tree(old)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["deploy", "up", spec, "fleet.size=2", "--insecure", "--port", port]
    words += ["--out", old / "run"]
    error = run_refused(capsys, *words)
    assert "expected a run of format 2, got format 1" in error
    assert hash_tree(old) == before


@pytest.mark.parametrize("command", ["server", "device"])
def test_old_keys_are_refused(old, tmp_path, capsys, command):
    spec = tmp_path / "served.toml"
    spec.write_text(SPEC.format(table="").replace("distreal", "fedavg").replace("100", "2"))
    words = {
        "server": ["server", spec, "--keys", old / "keys", "--out", tmp_path / "run"],
        "device": ["device", "--server", "localhost:9", "--keys", old / "keys"],
    }
    error = run_refused(capsys, *words[command])
    assert f"{old / 'keys'}: expected keys of format 3, got format 1" in error
    assert "make new ones: the server's with `pliant deploy init`" in error
    assert not (tmp_path / "run").exists()


def test_an_old_checkpoint_is_not_mistaken_for_a_damaged_one(old):
    with pytest.raises(UnsupportedFormat, match="expected a checkpoint of format 2, got format 1"):
        checkpoint.load_newest(old / "run" / "checkpoints")


@pytest.mark.parametrize(
    ("old_key", "new_key"),
    [
        ("method.weigh", "method.weighting"),
        ("rules.over", "rules.over_selection"),
        ("rules.early", "rules.close_early"),
        ("guard.bytes", "guard.size_factor"),
        ("search.by.type", None),
        ("search.fresh", "search.fresh_seeds"),
    ],
)
def test_the_error_for_an_old_key_names_the_new_one(tmp_path, capsys, old_key, new_key):
    spec = tmp_path / "spec.toml"
    spec.write_text(SPEC.format(table="").replace("distreal", "fedavg"))
    error = run_refused(capsys, "run", spec, f"{old_key}=1", "--out", tmp_path / "run")
    if new_key is None:
        old_key, new_key = "search.by", "search.algorithm"
    assert f"unknown key `{old_key}`; it is now `{new_key}`" in error
    assert not (tmp_path / "run").exists()
