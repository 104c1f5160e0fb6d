import random
import subprocess
import sys
import time
from hashlib import blake2b
from pathlib import Path

import msgspec
import pytest
import search_once
import torch
from small import images, network

import pliant
from pliant.engine.search import SNAPSHOT, TABLE, measured, search
from pliant.engine.trials import NAME, Trials, read_trials
from pliant.engine.workers import Processes
from pliant.explore import Exploration, Fast, Profile, Uniform, load_table
from pliant.explore.objective import Outcome, Trial
from pliant.explore.table_file import provenance_of

pytest.importorskip("pymoo")
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a search that nobody interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    search_once.run(folder)
    return folder


def files(folder):
    return {name: (folder / name).read_bytes() for name in (TABLE, NAME, SNAPSHOT)}


def test_every_training_is_on_record_and_counted_once(whole):
    lines = read_trials(whole / NAME)
    assert len({(line.rates, line.seed) for line in lines}) == len(lines)
    assert provenance_of(whole / TABLE)["trainings"] == len(lines)


def test_the_table_rises_from_the_highest_rates_to_the_full_network(whole):
    table = load_table(whole / TABLE)
    assert table.rates[0] == (0.5, 0.5)
    assert table.rates[-1] == (0.0, 0.0)
    assert len(table.rates) == 8
    assert table.shares[-1] == 1.0


def test_a_search_that_is_done_trains_nothing_again(whole, tmp_path):
    before = files(whole)
    search_once.run(whole)
    assert files(whole) == before


def test_processes_find_what_one_process_finds(whole, tmp_path):
    search_once.run(tmp_path, workers=Processes(count=2))
    assert files(tmp_path) == files(whole)


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_any_point_it_comes_to_the_same_front_bit_for_bit(whole, tmp_path, kills):
    chance = random.Random(kills)
    lines = len(read_trials(whole / NAME))
    command = [sys.executable, str(HERE / "search_once.py"), str(tmp_path)]
    for number in range(kills):
        process = subprocess.Popen(command)
        wanted = chance.randint(0, lines * (number + 1) // kills - 1)
        until = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < until:
            if (tmp_path / NAME).exists() and len(read_trials(tmp_path / NAME)) >= wanted:
                time.sleep(chance.random() * 0.02)
                break
            time.sleep(0.005)
        process.kill()
        process.wait()
    subprocess.run(command, check=True)
    assert files(tmp_path) == files(whole)


def test_a_corrupt_record_is_done_again_and_not_trusted(whole, tmp_path):
    lines = (whole / NAME).read_bytes().splitlines(keepends=True)
    good = msgspec.json.decode(lines[9])
    lines[9] = msgspec.json.encode(good | {"accuracy": 1.0}) + b"\n"
    lines[11] = b"\x00\xff" + lines[11][2:]
    lines[12] = lines[12][:30] + b"\n"
    (tmp_path / NAME).write_bytes(b"".join(lines))
    (tmp_path / SNAPSHOT).write_bytes(b"PLIANT broken")
    search_once.run(tmp_path)
    assert files(tmp_path)[TABLE] == files(whole)[TABLE]
    assert files(tmp_path)[SNAPSHOT] == files(whole)[SNAPSHOT]
    assert len(read_trials(tmp_path / NAME)) == len(lines)


def test_every_record_tells_the_cost_of_its_vector(whole):
    net = pliant.elastic(network(), torch.zeros(1, 1, 16, 16))
    for line in read_trials(whole / NAME):
        share = net.macs(line.rates, training=True) / net.macs(0.0, training=True)
        assert line.cost == share


def test_records_from_before_there_were_costs_are_still_taken(tmp_path):
    old = b'{"context":"a","rates":[0.5,0.0],"seed":7,"accuracy":0.25,"loss":1.5,"check":""}'
    check = blake2b(old, digest_size=8).hexdigest().encode()
    wrong = old.replace(b'"check":""', b'"check":"0123456789abcdef"')
    (tmp_path / NAME).write_bytes(old.replace(b'""', b'"%s"' % check) + b"\n" + wrong + b"\n")
    assert [line.seed for line in read_trials(tmp_path / NAME)] == [7]
    trials = Trials("a", tmp_path)
    assert trials.get(Trial((0.5, 0.0), 7)) == Outcome(0.25, 1.5)
    trials.close()


def test_records_of_another_objective_are_not_taken(whole, tmp_path):
    (tmp_path / NAME).write_bytes((whole / NAME).read_bytes())
    objective = msgspec.structs.replace(search_once.HOW.objective, batches=3)
    how = msgspec.structs.replace(search_once.HOW, by=Uniform(3), objective=objective)
    count = len(read_trials(whole / NAME))
    search(network(), images(80), how, folder=tmp_path)
    assert len(read_trials(tmp_path / NAME)) == count + 3 * 2 + 3 * 2


def test_in_python_a_table_takes_one_line():
    how = Exploration(
        by=Fast(least=6, rounds=1, refined=3, vectors=4),
        objective=search_once.HOW.objective,
        normalisers=2,
        fresh=1,
        rows=6,
    )
    table = pliant.search(network(), images(80), how)
    assert len(table.rates) == 6
    table.check(pliant.elastic(network(), torch.zeros(1, 1, 16, 16)))


def test_with_a_profile_both_costs_are_in_the_table():
    how = msgspec.structs.replace(
        search_once.HOW,
        by=Uniform(4),
        cost="seconds",
        profile=Profile(start=1e-3, per_mac=1e-9, per_byte=1e-9, batch=8),
    )
    table = search(network(), images(80), how)
    assert len(table.seconds) == len(table.shares) == len(table.rates)
    with pytest.raises(ValueError, match="Expected a profile"):
        msgspec.structs.replace(search_once.HOW, cost="seconds")


def test_a_judgement_puts_the_corners_at_their_places():
    import numpy as np

    found = measured(
        network(), images(80), search_once.HOW, np.array([[0.0, 0.0], [0.5, 0.5]]), (1, 2, 3)
    )
    assert found[0].tolist() == [1.0, 0.0]
    assert found[1, 0] == 0.0
