"""A user's own method, with server state and device state, works wherever the bundled ones do.

However it is run, the digest of the trained network is the same; for a federation of real
processes, see `tests/deploy/supervise/test_federation.py`.
"""

import json
import shutil
import subprocess
import sys

import pytest
from tests.experiment.user_method import CODE, read_digest, run, write_spec
from tests.suspended import start_suspended, wait_until_suspended

from pliant.analysis.runs import load_runs
from pliant.cli import main
from pliant.cli.server import check_experiment
from pliant.dashboard.run_index import RunIndex
from pliant.engine.ledger import RoundRecord
from pliant.engine.run_store import read_records
from pliant.experiment.config import load_experiment

pytestmark = pytest.mark.waits


@pytest.fixture
def spec(tmp_path):
    return write_spec(tmp_path)


@pytest.fixture(scope="module")
def digest(tmp_path_factory):
    """Return the digest of an undisturbed run in one process."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return run(write_spec(folder), folder / "run")


def test_a_method_that_states_nothing_is_fedavg(spec, tmp_path):
    digest = run(spec, tmp_path / "plain", "method.type=mine.py:Plain")
    assert digest == run(spec, tmp_path / "fedavg", "method.type=fedavg")


def test_two_processes_give_the_same_network(spec, tmp_path, digest):
    assert run(spec, tmp_path / "two", 'workers={type="processes",count=2}') == digest
    assert run(spec, tmp_path / "other", "method.beta=0.0") != digest


def test_a_killed_run_resumes_to_the_same_network(spec, tmp_path, digest):
    folder = tmp_path / "killed"
    with start_suspended([2], "run", spec, "--out", folder, stdout=subprocess.DEVNULL) as process:
        wait_until_suspended(process)
        process.kill()
    assert sum(isinstance(record, RoundRecord) for record in read_records(folder)) == 2
    assert main(["run", "--resume", str(folder)]) == 0
    assert read_digest(folder) == digest


def test_it_is_compared_reported_and_listed(spec, tmp_path, capsys, digest):
    methods = 'mine = { type = "mine.py:Remembering" }\nfedavg = { type = "fedavg" }\n'
    spec.write_text(f"{spec.read_text()}\n[matrix.method]\n{methods}")
    folder = tmp_path / "both"
    assert main(["compare", str(spec), "--out", str(folder), "--json"]) == 0
    assert "mine" in capsys.readouterr().out
    assert len(load_runs([folder])) == 2
    assert digest in {read_digest(config.parent) for config in folder.glob("*/config.json")}
    assert main(["report", str(folder), "--out", str(tmp_path / "report")]) == 0
    assert "mine" in (tmp_path / "report" / "index.html").read_text()
    index = RunIndex(folder)
    index.scan()
    assert "Remembering" in {summary.method for summary in index.list_summaries()}


def test_a_run_started_from_python_is_found_too(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        CODE
        + """
data = pl.data.digits().share(pl.Iid(), devices=3, proxy=7800)
net = pl.models.digits_cnn(hidden=16)
list(pl.simulate(Remembering(), net, data, pl.Fleet(size=3), rounds=1, folder="runs/mine"))
"""
    )
    subprocess.run([sys.executable, script], cwd=tmp_path, check=True)
    config = json.loads((tmp_path / "runs" / "mine" / "config.json").read_text())
    assert (config["method"]["type"], config["rounds"]) == ("Remembering", 1)
    assert len(load_runs([tmp_path / "runs"])) == 1


@pytest.mark.parametrize(
    ("type", "message"),
    [
        ("none.py:Method", "none.py:Method: expected a Python file, found none"),
        ("mine.py:Missing", "expected a function 'Missing', found none"),
        ("mine.py:not_a_method", "expected a method class with a field `local`, got another"),
    ],
)
def test_what_is_no_method_is_refused_in_one_line(spec, tmp_path, capsys, type, message):
    assert main(["run", str(spec), f"method.type={type}", "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_state_that_cannot_be_saved_is_refused_before_the_run(spec, tmp_path, capsys):
    type = "method.type=mine.py:Forgetting"
    assert main(["run", str(spec), type, "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert "NamedMemory.name: expected a Tensor, an int, a float, or a dict of" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match=r"NamedMemory.name: expected a Tensor"):
        check_experiment(load_experiment(spec, (type,)))  # `pliant server` and `deploy up`


def test_an_unknown_field_is_refused_by_name(spec, tmp_path, capsys):
    assert main(["run", str(spec), "method.betta=1", "--out", str(tmp_path / "run")]) == 2
    assert "unknown key `betta`; did you mean 'beta'?" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_run_does_not_resume_with_changed_code(spec, tmp_path, capsys):
    run(spec, tmp_path / "run", "rounds=1")
    shutil.copy(tmp_path / "run" / "config.json", tmp_path / "config.json")
    (tmp_path / "mine.py").write_text(CODE.replace("0.5", "0.6"))
    assert main(["run", "--resume", str(tmp_path / "run")]) == 2
    assert "expected the file unchanged since the run started" in capsys.readouterr().err


def test_the_code_is_pinned_by_its_hash(spec):
    method = load_experiment(spec).method
    assert len(method.sha256) == 64
