import math

import msgspec
import pytest
from tests.engine.small_runs import FLEET, LOCAL, SETTINGS, run

import pliant as pl
from pliant.engine.run_store import load_run_state
from pliant.methods.privacy import Release, compute_epsilon

EQUAL = pl.FedAvg(LOCAL, weighting="equal")
ON_TIME = pl.Fleet(size=12)
ALL_COUNT = msgspec.structs.replace(SETTINGS, rules=pl.RoundRules())


def make_settings(noise, clip=1e9, settings=SETTINGS):
    return msgspec.structs.replace(settings, privacy=pl.DevicePrivacy(clip=clip, noise=noise))


@pytest.mark.parametrize("method", [EQUAL, pl.Distreal(local=LOCAL, merging="equal")])
def test_without_noise_and_with_a_wide_clip_a_run_is_as_without_privacy(method):
    plain = run(method, fleet=ON_TIME, settings=ALL_COUNT)
    private = run(method, fleet=ON_TIME, settings=make_settings(0.0, settings=ALL_COUNT))
    assert private == plain


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_a_resumed_run_has_the_same_noise_and_epsilon(tmp_path, noise):
    if noise:
        pytest.importorskip("dp_accounting")
    settings = make_settings(noise, clip=0.5)
    whole = run(EQUAL, settings=settings)
    stops = iter([False, False, True])
    first = run(EQUAL, settings=settings, folder=tmp_path, is_stopped=lambda: next(stops))
    rest = run(EQUAL, settings=settings, folder=tmp_path)
    assert len(first) == 3
    assert first + rest == whole


def test_epsilon_counts_the_rounds_that_merged(tmp_path):
    pytest.importorskip("dp_accounting")
    settings = make_settings(2.0, clip=0.5)
    records = run(EQUAL, settings=settings, folder=tmp_path)
    assert all(record.merged for record in records)
    expected = [
        compute_epsilon(settings.privacy, [Release(FLEET.size, 4, number)])
        for number in range(1, 7)
    ]
    assert [record.epsilon for record in records] == expected == sorted(expected)
    assert load_run_state(tmp_path).releases == (Release(12, 4, 6),)
    assert all(math.isfinite(value) for value in expected)


def test_a_run_without_privacy_has_no_epsilon():
    assert [record.epsilon for record in run(EQUAL)] == [None] * 6
