"""Selection: uniform, available, and by the history of speeds, losses and ages."""

import math
import sys
import tracemalloc
from functools import partial

import numpy as np
import pytest
from msgspec.structs import replace
from tests.engine import small_runs

from pliant import devices
from pliant.devices import ConstantTrace, Fleet
from pliant.engine.ledger import TaskRecord
from pliant.engine.round_loop import RunSettings
from pliant.engine.selection import (
    Fastest,
    LastTask,
    Oort,
    PowerOfChoice,
    compute_oort_utilities,
    extend_history,
    select_devices,
)
from pliant.engine.simulate import simulate
from pliant.value import decode

ALL = ["uniform", "available", Fastest(), PowerOfChoice(), Oort()]


def draw(fleet, count, selection="uniform", *, seed=0, round=0, now=0.0, history=None):
    speeds = partial(fleet.speeds_at, time=now, seed=seed)
    return select_devices(
        fleet.size, count, selection, seed=seed, round=round, speeds=speeds, history=history or {}
    )


@pytest.mark.parametrize("selection", ALL)
@pytest.mark.parametrize(("size", "count"), [(1, 1), (10, 3), (10, 10), (10, 99), (1000, 10)])
def test_devices_are_drawn_without_replacement_in_rising_order(selection, size, count):
    drawn = draw(Fleet(size=size), count, selection)
    assert len(drawn) == min(size, count)
    assert (np.diff(drawn) > 0).all()
    assert drawn.min() >= 0
    assert drawn.max() < size


def test_a_draw_depends_on_seed_and_round():
    fleet = Fleet(size=1000)
    assert draw(fleet, 10).tolist() == draw(fleet, 10).tolist()
    assert draw(fleet, 10, round=1).tolist() != draw(fleet, 10).tolist()
    assert draw(fleet, 10, seed=1).tolist() != draw(fleet, 10).tolist()


@pytest.mark.parametrize("selection", ["uniform", "available"])
def test_every_device_is_drawn_equally_often(selection):
    rounds, fleet = 3000, Fleet(size=20)
    counts = np.zeros(20)
    for round in range(rounds):
        counts[draw(fleet, 5, selection, round=round)] += 1
    expected = rounds * 5 / 20
    deviation = np.sqrt(rounds * 0.25 * 0.75)
    assert abs(counts - expected).max() < 4.5 * deviation


def test_only_available_devices_are_drawn(tmp_path):
    file = tmp_path / "availability.json"
    early = '{"active": [0], "inactive": [1], "finish_time": 4}'
    late = '{"active": [2], "inactive": [3], "finish_time": 4}'
    file.write_text(f"[{early}, {late}]")
    fleet = Fleet(size=400, speed=devices.RecordedAvailability(str(file)))
    for now, available in ((0.5, range(0, 400, 2)), (2.5, range(1, 400, 2))):
        assert set(draw(fleet, 20, "available", now=now).tolist()) <= set(available)
        assert draw(fleet, 400, "available", now=now).tolist() == list(available)


def test_no_device_is_drawn_when_none_is_available():
    fleet = Fleet(size=50, speed=devices.OnOffWindows(windows=((1.0, 2.0),), period=4.0))
    assert len(draw(fleet, 5, "available", now=0.5)) == 0
    assert len(draw(fleet, 5, "available", now=1.5)) == 5


def test_rare_available_devices_are_found():
    unavailable = devices.DeviceClass(share=98.0, speed=ConstantTrace(0.0))
    fleet = Fleet(size=5000, classes=(unavailable, devices.DeviceClass(share=2.0)))
    available = np.flatnonzero(fleet.speeds_at(np.arange(5000), 0.0) > 0)
    assert 50 < len(available) < 200
    drawn = draw(fleet, 40, "available")
    assert len(drawn) == 40
    assert set(drawn.tolist()) <= set(available.tolist())


@pytest.mark.parametrize("selection", ["uniform", "available"])
def test_a_large_fleet_costs_no_more_than_a_small_one(selection):
    def measure_cost(fleet):
        draw(fleet, 10, selection)
        calls = 0

        def count(frame, event, argument):
            nonlocal calls
            calls += 1

        tracemalloc.start()
        sys.setprofile(count)
        draw(fleet, 10, selection)
        sys.setprofile(None)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return calls, peak

    small, small_peak = measure_cost(Fleet(size=1_000, speed=devices.ChangingTrace()))
    large, large_peak = measure_cost(Fleet(size=1_000_000_000, speed=devices.ChangingTrace()))
    assert large < 2 * small  # calls, because seconds vary
    assert large_peak < 2 * small_peak + 10_000


def test_as_many_candidates_as_devices_is_a_uniform_draw():
    fleet = Fleet(size=30, speed=ConstantTrace(0.1, 1.0))
    history = {device: LastTask(0, 1.0, 10, float(device)) for device in range(30)}
    for selection in (Fastest(candidates=1.0), PowerOfChoice(candidates=1.0)):
        for round in range(20):
            drawn = draw(fleet, 7, selection, round=round, history=history)
            assert drawn.tolist() == draw(fleet, 7, "available", round=round).tolist()


def test_the_fastest_candidates_are_selected():
    fleet = Fleet(size=40, speed=ConstantTrace(0.1, 1.0))
    speeds = fleet.speeds_at(np.arange(40), 0.0)
    everyone = Fastest(candidates=10.0, age_bonus=0.0)
    assert draw(fleet, 4, everyone).tolist() == sorted(np.argsort(-speeds)[:4].tolist())


def test_the_age_bonus_visits_everybody():
    fleet, history = Fleet(size=40, speed=ConstantTrace(0.05, 1.0)), {}
    selection, visited = Fastest(candidates=10.0, age_bonus=0.5), set()
    for round in range(200):
        drawn = draw(fleet, 4, selection, round=round, history=history).tolist()
        history = history | {device: LastTask(round, 1.0) for device in drawn}
        visited |= set(drawn)
    assert visited == set(range(40))
    without = Fastest(candidates=10.0, age_bonus=0.0)
    assert len({d for r in range(200) for d in draw(fleet, 4, without, round=r).tolist()}) == 4


def test_power_of_choice_selects_unknown_devices_and_then_the_largest_losses():
    fleet = Fleet(size=8)
    history = {device: LastTask(0, 1.0, 10, float(device)) for device in range(6)}
    everyone = PowerOfChoice(candidates=4.0)
    assert draw(fleet, 2, everyone, history=history).tolist() == [6, 7]
    assert draw(fleet, 4, everyone, history=history).tolist() == [4, 5, 6, 7]


def test_the_utility_of_oort_by_hand():
    # samples × loss: 10, 20, 30, and 1000, which is clipped to the median of the four, 25
    history = {
        0: LastTask(round=0, seconds=1.0, samples=10, loss=1.0),
        1: LastTask(round=1, seconds=1.0, samples=10, loss=2.0),
        2: LastTask(round=3, seconds=2.0, samples=10, loss=3.0),
        3: LastTask(round=3, seconds=4.0, samples=100, loss=10.0),
    }
    oort = Oort(clip=0.5, age_weight=0.1, fast_share=0.5, slow_penalty=2.0)
    utilities = compute_oort_utilities(oort, np.arange(4), history, round=9)
    bonus = [math.sqrt(0.1 * math.log(10) / last) for last in (1, 2, 4, 4)]
    # (25 - 10) / 15 = 1 for the clipped ones; the median duration is 1.5 s
    expected = [
        0.0 + bonus[0],
        10 / 15 + bonus[1],
        (1.0 + bonus[2]) * (1.5 / 2.0) ** 2,
        (1.0 + bonus[3]) * (1.5 / 4.0) ** 2,
    ]
    assert utilities == pytest.approx(expected)


def test_oort_explores_less_and_less():
    fleet = Fleet(size=1000)
    history = {device: LastTask(0, 1.0, 10, 1.0) for device in range(100)}
    oort = Oort(exploration=0.8, decay=0.5, min_exploration=0.1)

    def count_new(round):
        drawn = draw(fleet, 20, oort, round=round, history=history)
        assert len(set(drawn.tolist())) == 20
        return int((drawn >= 100).sum())

    assert [count_new(round) for round in (0, 1, 2, 3, 9)] == [16, 8, 4, 2, 2]


def test_oort_prefers_useful_devices_and_never_starves_a_small_fleet():
    fleet = Fleet(size=20)
    history = {device: LastTask(0, 1.0, 10, 100.0 if device < 5 else 0.01) for device in range(20)}
    drawn = draw(fleet, 5, Oort(), round=50, history=history)
    assert drawn.tolist() == [0, 1, 2, 3, 4]
    assert len(draw(fleet, 20, Oort(), round=50, history=history)) == 20


def make_task(device, round, outcome, samples, loss, seconds):
    return TaskRecord(
        round, device, outcome, samples, 1, 1.0, 1.0, 1.0, 0, 0, seconds, 0.0, loss=loss
    )


def test_a_failed_task_moves_the_age_and_keeps_the_last_loss():
    history = extend_history({}, [make_task(3, 0, "finished", 32, 2.0, 0.5)])
    history = extend_history(history, [make_task(3, 4, "late", 0, None, 1.0)])
    history = extend_history(history, [make_task(5, 4, "dropped", 0, None, 0.25)])
    assert history == {3: LastTask(4, 1.0, 32, 2.0), 5: LastTask(4, 0.25, 0, None)}


@pytest.mark.parametrize("selection", [Fastest(), PowerOfChoice(), Oort()])
def test_a_resumed_run_selects_as_if_it_had_never_stopped(selection, tmp_path):
    settings = replace(small_runs.SETTINGS, select=selection, rounds=5, checkpoint_every=2)
    whole = small_runs.run(settings=settings)
    run = simulate(
        small_runs.FEDAVG,
        small_runs.network(),
        small_runs.data(),
        small_runs.FLEET,
        settings=settings,
        folder=tmp_path,
    )
    first = [next(run) for _ in range(3)]
    run.close()
    rest = small_runs.run(settings=settings, folder=tmp_path)
    assert [*first[:2], *rest] == whole
    assert whole != small_runs.run(settings=replace(settings, select="available"))


def test_a_file_chooses_a_selection_by_its_type():
    settings = decode({"select": {"type": "oort", "exploration": 0.5}}, RunSettings)
    assert settings.select == Oort(exploration=0.5)
    with pytest.raises(ValueError, match="candidates"):
        decode({"select": {"type": "fastest", "candidates": 0.5}}, RunSettings)
