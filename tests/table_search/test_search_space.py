import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.engine.small_runs import images, network
from tests.table_search import search_stages
from tests.table_search.search_stages import SETTINGS, make_network, run
from torch.utils.flop_counter import FlopCounterMode

import pliant
from pliant.nn.elastic import elastic
from pliant.nn.pareto_table import count_step_macs
from pliant.nn.table_file import load_table, read_provenance
from pliant.params import digest, get_params
from pliant.rng import derive_seed
from pliant.storage.run_dir import TABLE_FILE
from pliant.table_search import Nsga2, RandomSearch, SearchSettings, StepTimeModel, SurrogateSearch
from pliant.table_search.ask_tell import SearchProblem
from pliant.table_search.run import open_search
from pliant.table_search.search_space import SearchSpace, list_levels, make_search_space
from pliant.table_search.short_training import (
    Trial,
    make_search_context,
    run_short_training,
    train_snapshot,
)
from pliant.table_search.surrogate import Quadratic, probe_quadratic
from pliant.table_search.surrogate_search import probe_costs
from pliant.table_search.trial_log import TRIALS_FILE, read_trials
from pliant.workers.pool import ProcessWorkers

ROOT = Path(__file__).parents[2]
NET = elastic(make_network(), torch.zeros(1, 1, 16, 16))
SPACE = SearchSpace(2, 0.5, (None, 12, 8), (1.0, 0.5))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return the folder of an uninterrupted search of two stages."""
    folder = tmp_path_factory.mktemp("finished")
    run(folder)
    return folder


def test_each_level_has_an_equal_part_of_the_range():
    genes = np.linspace(0, 0.5, 601)[:-1]
    trials = [SPACE.make_trial(np.array([0.0, 0.0, gene, 0.5 - gene]), 0) for gene in genes]
    assert Counter(trial.side for trial in trials) == {None: 200, 12: 200, 8: 200}
    assert Counter(trial.batch for trial in trials) == {0.5: 301, 1.0: 299}


@given(st.lists(st.floats(0, 0.5), min_size=4, max_size=4))
def test_rounding_a_vector_does_not_change_its_step(genes):
    vector = np.array(genes)
    rounded = SPACE.round(vector[None])[0]
    assert (SPACE.round(rounded[None])[0] == rounded).all()
    before, after = SPACE.make_trial(vector, 1), SPACE.make_trial(rounded, 1)
    assert (before.side, before.batch) == (after.side, after.batch)
    assert after.rates == pytest.approx(before.rates, rel=1e-6)


def test_the_ends_are_the_full_and_the_cheapest_step():
    assert SPACE.make_trial(np.zeros(4), 0) == Trial((0.0, 0.0), 0)
    assert SPACE.make_trial(np.full(4, 0.5), 0) == Trial((0.5, 0.5), 0, 8, 0.5)


def test_the_full_side_and_share_always_belong_to_the_space():
    assert make_search_space(NET, 0.5, (8, 16), (1.0,)) == SearchSpace(2, 0.5, (None, 8))
    assert make_search_space(NET, 0.5, (), (0.5, 0.25)).batch_shares == (1.0, 0.5, 0.25)
    with pytest.raises(ValueError, match=r"search\.sides of at most 16 pixels, got 32"):
        make_search_space(NET, 0.5, (32,), ())
    with pytest.raises(ValueError, match="cannot run at 8x8"):
        make_search_space(elastic(network(), torch.zeros(1, 1, 16, 16)), 0.5, (8,), ())


def test_the_cost_of_every_step_is_what_torch_counts():
    settings = replace(SETTINGS, stages=(1.0,))
    with open_search(make_network(), images(80), settings) as state:
        for levels in list_levels(state.space.level_counts):
            vector = np.array([0.0, 0.0, *levels]) * 0.5
            trial = state.space.make_trial(vector, 0)
            side, samples = trial.side or 16, int(8 * trial.batch)
            with FlopCounterMode(display=False) as counter:
                make_network()(torch.rand(samples, 1, side, side)).sum().backward()
            assert 2 * 8 * state.step_cost(vector) == counter.get_total_flops()


def test_seconds_of_a_smaller_step_follow_its_macs_and_bytes():
    model = StepTimeModel(1e-3, 1e-9, 1e-8, batch=8)
    small = NET.at(8, 8)
    work = 1e-9 * 4 * small.macs(0.5, training=True) + 1e-8 * 4 * 4 * small.count_activations(0.5)
    assert model.predict_seconds(NET, 0.5, 8, 0.5) == pytest.approx(1e-3 + work)
    settings = replace(SETTINGS, cost="seconds", profile=model, stages=(1.0,))
    with open_search(make_network(), images(80), settings) as state:
        assert state.step_cost(state.full_step) == model.predict_seconds(NET, 0.0)
        assert state.step_cost(state.cheapest_step) == model.predict_seconds(NET, 0.5, 8, 0.5)


def test_the_cost_of_rates_is_probed_closely_at_every_side_and_share():
    with open_search(make_network(), images(80), SETTINGS) as state:
        counts = state.space.level_counts
        problem = SearchProblem(4, 0.5, state.compute_costs, (), 0, 0, counts)
        rates = np.random.default_rng(0).uniform(0, 1, (20, 2))
        for values, form in probe_costs(problem).items():
            costs = state.compute_costs(np.hstack([rates, np.tile(values, (20, 1))]) * 0.5)
            assert form(rates) == pytest.approx(costs - 1.0, abs=0.01)


def test_a_form_with_its_last_coordinates_fixed_is_the_same_form():
    rng = np.random.default_rng(0)
    square = rng.normal(size=(4, 4))
    form = Quadratic(rng.normal(size=4), square + square.T, 0.5)
    points = rng.uniform(0, 1, (10, 4))
    points[:, 2:] = (0.25, 0.75)
    assert form.fix_last((0.25, 0.75))(points[:, :2]) == pytest.approx(form(points))
    assert probe_quadratic(form, 4)(points) == pytest.approx(form(points))


def test_a_short_training_uses_the_side_and_the_share():
    context = make_search_context(make_network(), images(80), SETTINGS.objective)
    params = train_snapshot(context)
    steps = [(None, 1.0), (8, 1.0), (None, 0.5), (8, 0.5)]
    outcomes = {run_short_training(context, params, Trial((0.0, 0.0), 3, *step)) for step in steps}
    assert len(outcomes) == 4


def test_a_snapshot_is_taken_on_the_way_of_one_training():
    objective = replace(SETTINGS.objective, cooling=0.0)
    context = make_search_context(make_network(), images(80), objective)
    assert digest(train_snapshot(context, 0.0)) == digest(get_params(make_network()))
    short = replace(objective, snapshot_batches=3)
    half = make_search_context(make_network(), images(80), short)
    assert digest(train_snapshot(context, 0.5)) == digest(train_snapshot(half))


def test_the_full_side_and_share_alone_search_rates_alone(tmp_path):
    plain = replace(SETTINGS, sides=(), batch_shares=(), stages=(1.0,))
    explicit = replace(plain, sides=(16,), batch_shares=(1.0,))
    tables = []
    for name, settings in {"plain": plain, "explicit": explicit}.items():
        tables.append(run(tmp_path / name, settings).table)
    assert tables[0] == tables[1]
    logs = [(tmp_path / name / TRIALS_FILE).read_bytes() for name in ("plain", "explicit")]
    assert logs[0] == logs[1]
    assert b"side" not in logs[0]


@pytest.mark.parametrize("algorithm", [Nsga2(population=6, generations=2), RandomSearch(12)])
def test_every_algorithm_searches_all_axes(algorithm):
    if isinstance(algorithm, Nsga2):
        pytest.importorskip("pymoo")
    table = run(settings=replace(SETTINGS, algorithm=algorithm, stages=(1.0,))).table
    assert table.get_scale(0) == (8, 0.5)
    assert table.get_scale(len(table.rates) - 1) == (None, 1.0)
    assert len(set(table.sides)) > 1


def test_each_stage_has_a_table_from_the_cheapest_to_the_full_step(finished):
    table = load_table(finished / TABLE_FILE)
    assert table == run(finished).table
    stages = table.split_stages()
    assert [set(part.stages) for part in stages] == [{0.0}, {0.5}]
    for part in stages:
        assert (part.rates[0], part.get_scale(0)) == ((0.5, 0.5), (8, 0.5))
        assert (part.rates[-1], part.get_scale(len(part.rates) - 1)) == ((0.0, 0.0), (None, 1.0))
        assert part.shares[-1] == 1.0
    records = read_trials(finished / TRIALS_FILE)
    assert read_provenance(finished / TABLE_FILE)["trainings"] == len(records)
    assert len({record.context for record in records}) == 2
    assert len({(record.context, record.trial) for record in records}) == len(records)


def test_every_record_has_the_cost_of_its_step(finished):
    for record in read_trials(finished / TRIALS_FILE):
        trial = record.trial
        macs = count_step_macs(NET, trial.rates, trial.side, trial.batch)
        assert record.cost == macs / NET.macs(0.0, training=True)


def read_files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_worker_processes_write_the_same_files(finished, tmp_path):
    run(tmp_path, workers=ProcessWorkers(count=2))
    assert read_files(tmp_path) == read_files(finished)


def test_a_search_killed_in_its_second_stage_ends_with_the_same_files(finished, tmp_path):
    records = read_trials(finished / TRIALS_FILE)
    first = Counter(record.context for record in records)[records[0].context]
    path, rng = tmp_path / TRIALS_FILE, random.Random(0)
    command = [sys.executable, "-m", search_stages.__name__, str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT)
    while process.poll() is None and len(read_trials(path) if path.exists() else ()) <= first:
        time.sleep(0.005)
    time.sleep(rng.random() * 0.02)
    process.kill()
    process.wait()
    killed = len(read_trials(path))
    assert first < killed < len(records)
    run(tmp_path)
    assert read_files(tmp_path) == read_files(finished)


@pytest.mark.parametrize("sites", [2, 15, 39, 99])
def test_the_fast_search_needs_a_tenth_of_the_trainings_of_the_full_one(sites):
    settings = SearchSettings()
    genes, seeds = sites + 2, settings.objective.seeds  # with sides and batch shares
    corners = 2 * max(settings.corner_seeds, seeds)
    common = corners + settings.fresh_seeds * (settings.rows + settings.equal_rates)
    fast = SurrogateSearch().count_trainings(genes, seeds) + common
    assert fast <= 0.1 * (settings.full_algorithm.count_trainings(genes, seeds) + common)


def test_a_search_of_stages_trains_as_much_as_it_announces(finished):
    progress = run(finished)
    assert (progress.phase, progress.stage) == ("done", 2)
    design = SurrogateSearch.count_trainings(SETTINGS.algorithm, 4, SETTINGS.objective.seeds)
    assert progress.expected == 2 * (design + 2 * 2 + 2 * (10 + SETTINGS.equal_rates))
    assert progress.trainings <= progress.expected


@pytest.mark.parametrize("stages", [(), (0.5, 0.5), (0.5, 1.0), (0.6, 0.3)])
def test_stages_must_rise_and_leave_something_to_train(stages):
    with pytest.raises(ValueError, match="Expected one stage, or rising ones below 1"):
        pliant.SearchSettings(stages=stages)


def test_equal_rates_of_whole_steps_are_measured_at_the_fresh_seeds_of_every_stage(finished):
    equal_rates = read_provenance(finished / TABLE_FILE)["equal_rates"]
    accuracies = {(r.context, r.trial): r.accuracy for r in read_trials(finished / TRIALS_FILE)}
    contexts = list(dict.fromkeys(context for context, _ in accuracies))
    rates = np.linspace(0.5, 0.0, SETTINGS.equal_rates).astype(np.float32).tolist()
    seeds = [derive_seed(SETTINGS.objective.seed, "fresh", n) for n in range(SETTINGS.fresh_seeds)]
    full_macs = NET.macs(0.0, training=True)
    for context, points in zip(contexts, equal_rates, strict=True):
        shares, gains = zip(*points, strict=True)
        assert list(shares) == [count_step_macs(NET, rate) / full_macs for rate in rates]
        means = [
            np.mean([accuracies[context, Trial((rate, rate), seed)] for seed in seeds])
            for rate in rates
        ]
        # gains count from the accuracy of the snapshot, which is the same for all
        assert np.ptp(np.array(gains) - means) < 1e-9
