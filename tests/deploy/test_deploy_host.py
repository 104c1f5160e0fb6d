from types import SimpleNamespace

import psutil
import pytest

from pliant.deploy.host import (
    Hints,
    Limits,
    allowed_share,
    cpu_quota,
    expected_slowdown,
    hints,
    is_hot,
    refusal,
)


def test_a_quota_of_cgroup_2_is_read(tmp_path):
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert cpu_quota(tmp_path) == 1.5


def test_a_quota_of_cgroup_1_is_read(tmp_path):
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("50000\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert cpu_quota(tmp_path) == 0.5


@pytest.mark.parametrize("text", ["max 100000\n", "nonsense\n", "-1 100000\n", "1 0\n"])
def test_no_quota_is_none(tmp_path, text):
    (tmp_path / "cpu.max").write_text(text)
    assert cpu_quota(tmp_path) is None
    assert cpu_quota(tmp_path / "nowhere") is None


def test_this_machine_can_be_asked(tmp_path):
    (tmp_path / "cpu.max").write_text("25000 100000\n")
    found = hints(tmp_path, tmp_path)
    assert found.cores == 0.25
    assert not found.is_hot


@pytest.mark.parametrize(("now", "hot"), [("84000", False), ("85000", True), ("x", False)])
def test_a_zone_at_its_limit_is_hot(tmp_path, now, hot):
    zone = tmp_path / "thermal_zone0"
    zone.mkdir()
    (zone / "temp").write_text(now)
    (zone / "trip_point_0_type").write_text("passive\n")
    (zone / "trip_point_0_temp").write_text("85000\n")
    assert is_hot(tmp_path) == hot


@pytest.mark.parametrize(
    ("charging", "only", "said"),
    [
        (False, True, "it is not charging"),
        (True, True, None),
        (None, True, None),
        (False, False, None),
    ],
)
def test_a_device_on_battery_declines_if_its_user_says_so(charging, only, said):
    found = Hints(1.0, 0.0, 0.5, charging, False)
    assert refusal(Limits(only_when_charging=only), found) == said


def test_a_share_of_nothing_is_refused():
    with pytest.raises(ValueError, match=r"cpu_share"):
        Limits(cpu_share=0.0)


@pytest.mark.parametrize(("hot", "share"), [(False, 0.3), (True, 0.15)])
def test_a_hot_machine_uses_half_of_what_its_user_allows(hot, share):
    assert allowed_share(Limits(cpu_share=0.3), Hints(2.0, 0.0, None, None, hot)) == share


@pytest.mark.parametrize(
    ("cores", "load", "slowdown"),
    [(2.0, None, 1.0), (2.0, 0.5, 1.0), (1.0, 3.0, 3.0), (0.25, 0.0, 4.0), (0.5, 2.0, 4.0)],
)
def test_quota_and_load_tell_what_to_expect_before_anything_was_measured(cores, load, slowdown):
    found = Hints(cores, load, None, None, False)
    assert expected_slowdown(Limits(), found) == slowdown
    assert expected_slowdown(Limits(cpu_share=0.5), found) == 2 * slowdown


def test_a_machine_that_cannot_tell_whether_it_charges_is_not_taken_for_one_on_battery(monkeypatch):
    battery = SimpleNamespace(percent=50.0, power_plugged=None)
    monkeypatch.setattr(psutil, "sensors_battery", lambda: battery, raising=False)
    assert hints().is_charging is None
    assert refusal(Limits(only_when_charging=True), hints()) is None
