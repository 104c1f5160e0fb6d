import random
import subprocess
import sys
import time
from hashlib import blake2b
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from msgspec.structs import replace
from tests.engine.small_runs import images, network
from tests.table_search import search_once

import pliant
from pliant.nn.sites import ElasticOptions
from pliant.nn.table_file import load_table, read_provenance
from pliant.storage.run_dir import TABLE_FILE
from pliant.table_search import StepTimeModel, SurrogateSearch, UniformRates
from pliant.table_search.run import iter_search, open_search, search
from pliant.table_search.short_training import Trial, TrialOutcome
from pliant.table_search.snapshot import SNAPSHOT_FILE
from pliant.table_search.trial_log import TRIALS_FILE, TrialLog, read_trials
from pliant.workers.pool import ProcessWorkers

pytest.importorskip("pymoo")
ROOT = Path(__file__).parents[2]
HEADER = b'{"type":"header","format":2}\n'


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return the folder of an uninterrupted search."""
    folder = tmp_path_factory.mktemp("finished")
    search_once.run(folder)
    return folder


def read_files(folder):
    return {name: (folder / name).read_bytes() for name in (TABLE_FILE, TRIALS_FILE, SNAPSHOT_FILE)}


def test_every_training_is_logged_and_counted_once(finished):
    records = read_trials(finished / TRIALS_FILE)
    assert len({(record.rates, record.seed) for record in records}) == len(records)
    assert read_provenance(finished / TABLE_FILE)["trainings"] == len(records)


def test_the_table_rises_from_the_highest_rates_to_the_full_network(finished):
    table = load_table(finished / TABLE_FILE)
    assert table.rates[0] == (0.5, 0.5)
    assert table.rates[-1] == (0.0, 0.0)
    assert len(table.rates) == 8
    assert table.shares[-1] == 1.0


def test_a_search_includes_hidden_layers_on_request():
    settings = replace(search_once.SETTINGS, algorithm=UniformRates(4))
    options = ElasticOptions(hidden=True)
    table = search(network(), images(80), settings, elastic_options=options)
    assert table.rates[0] == (0.5, 0.5, 0.5)


def test_a_finished_search_trains_nothing_again(finished):
    before = read_files(finished)
    search_once.run(finished)
    assert read_files(finished) == before


def test_the_points_of_a_search_are_read_only_once_it_is_finished(finished, tmp_path):
    inputs = (network(), images(80), search_once.SETTINGS)
    steps = iter_search(*inputs, folder=tmp_path)
    next(steps)
    steps.close()
    before = (tmp_path / TRIALS_FILE).read_bytes()
    with (
        open_search(*inputs, folder=tmp_path) as state,
        pytest.raises(ValueError, match=r"Expected a finished search, found \d+ trainings missing"),
    ):
        state.repeat_trials()
    assert (tmp_path / TRIALS_FILE).read_bytes() == before
    before = read_files(finished)
    with open_search(*inputs, folder=finished) as state:
        assert state.repeat_trials().shape[1] == 2
    assert read_files(finished) == before


def test_worker_processes_write_the_same_files_as_one_process(finished, tmp_path):
    search_once.run(tmp_path, workers=ProcessWorkers(count=2))
    assert read_files(tmp_path) == read_files(finished)


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_a_search_killed_at_any_point_ends_with_the_same_files(finished, tmp_path, kills):
    rng = random.Random(kills)
    trial_count = len(read_trials(finished / TRIALS_FILE))
    path = tmp_path / TRIALS_FILE
    command = [sys.executable, "-m", "tests.table_search.search_once", str(tmp_path)]
    for number in range(kills):
        process = subprocess.Popen(command, cwd=ROOT)
        target = rng.randint(0, trial_count * (number + 1) // kills - 1)
        while process.poll() is None:
            if path.exists() and len(read_trials(path)) >= target:
                time.sleep(rng.random() * 0.02)
                break
            time.sleep(0.005)
        process.kill()
        process.wait()
    search_once.run(tmp_path)
    assert read_files(tmp_path) == read_files(finished)


def test_a_trial_with_a_corrupt_record_runs_again(finished, tmp_path):
    header, *lines = (finished / TRIALS_FILE).read_bytes().splitlines(keepends=True)
    assert header == HEADER
    good = msgspec.json.decode(lines[9])
    lines[9] = msgspec.json.encode(good | {"accuracy": 1.0}) + b"\n"
    lines[11] = b"\x00\xff" + lines[11][2:]
    lines[12] = lines[12][:30] + b"\n"
    (tmp_path / TRIALS_FILE).write_bytes(header + b"".join(lines))
    (tmp_path / SNAPSHOT_FILE).write_bytes(b"PLIANT broken")
    search_once.run(tmp_path)
    for name in (TABLE_FILE, SNAPSHOT_FILE):
        assert (tmp_path / name).read_bytes() == (finished / name).read_bytes()
    assert len(read_trials(tmp_path / TRIALS_FILE)) == len(lines)


def test_every_record_has_the_cost_of_its_vector(finished):
    net = pliant.elastic(network(), torch.zeros(1, 1, 16, 16))
    for record in read_trials(finished / TRIALS_FILE):
        share = net.macs(record.rates, training=True) / net.macs(0.0, training=True)
        assert record.cost == share


def test_a_record_without_a_cost_is_read_and_one_with_a_wrong_digest_is_not(tmp_path):
    old = b'{"context":"a","rates":[0.5,0.0],"seed":7,"accuracy":0.25,"loss":1.5,"check":""}'
    check = blake2b(old, digest_size=8).hexdigest().encode()
    wrong = old.replace(b'"check":""', b'"check":"0123456789abcdef"')
    right = old.replace(b'""', b'"%s"' % check)
    (tmp_path / TRIALS_FILE).write_bytes(HEADER + right + b"\n" + wrong + b"\n")
    assert [record.seed for record in read_trials(tmp_path / TRIALS_FILE)] == [7]
    log = TrialLog("a", tmp_path)
    assert log.outcomes.get(Trial((0.5, 0.0), 7)) == TrialOutcome(0.25, 1.5)
    log.close()


def test_records_of_another_objective_are_not_used(finished, tmp_path):
    (tmp_path / TRIALS_FILE).write_bytes((finished / TRIALS_FILE).read_bytes())
    objective = replace(search_once.OBJECTIVE, batches=3)
    settings = replace(search_once.SETTINGS, algorithm=UniformRates(3), objective=objective)
    settings = replace(settings, equal_rates=0)
    count = len(read_trials(finished / TRIALS_FILE))
    search(network(), images(80), settings, folder=tmp_path)
    assert len(read_trials(tmp_path / TRIALS_FILE)) == count + 3 * 2 + 3 * 2


def test_in_python_a_table_takes_one_line():
    algorithm = SurrogateSearch(min_design=6, rounds=1, per_round=3, vectors=4)
    settings = replace(search_once.SETTINGS, algorithm=algorithm, corner_seeds=2, rows=6)
    table = pliant.search(network(), images(80), settings)
    assert len(table.rates) == 6
    table.check_network(pliant.elastic(network(), torch.zeros(1, 1, 16, 16)))


def test_with_a_profile_both_costs_are_in_the_table():
    settings, profile = search_once.SETTINGS, StepTimeModel(1e-3, 1e-9, 1e-9, batch=8)
    settings = replace(settings, algorithm=UniformRates(4), cost="seconds", profile=profile)
    table = search(network(), images(80), settings)
    assert len(table.seconds) == len(table.shares) == len(table.rates)
    with pytest.raises(ValueError, match="Expected a profile"):
        replace(search_once.SETTINGS, cost="seconds")


def test_the_measured_corners_have_cost_one_and_zero():
    corners = np.array([[0.0, 0.0], [0.5, 0.5]])
    with open_search(network(), images(80), search_once.SETTINGS) as state:
        points = state.measure_vectors(corners, (1, 2, 3))
    assert points[0].tolist() == [1.0, 0.0]
    assert points[1, 0] == 0.0
