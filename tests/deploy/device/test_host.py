from types import SimpleNamespace

import psutil
import pytest

from pliant.deploy.device.host import (
    HostStatus,
    Limits,
    is_hot,
    read_host,
)


def test_the_status_of_this_machine_is_read(tmp_path):
    (tmp_path / "cpu.max").write_text("25000 100000\n")
    host = read_host(tmp_path, tmp_path)
    assert host.cores == 0.25
    assert not host.is_hot


@pytest.mark.parametrize(("millidegrees", "hot"), [("84000", False), ("85000", True), ("x", False)])
def test_a_zone_at_its_limit_is_hot(tmp_path, millidegrees, hot):
    zone = tmp_path / "thermal_zone0"
    zone.mkdir()
    (zone / "temp").write_text(millidegrees)
    (zone / "trip_point_0_type").write_text("passive\n")
    (zone / "trip_point_0_temp").write_text("85000\n")
    assert is_hot(tmp_path) == hot


@pytest.mark.parametrize(
    ("charging", "only", "reason"),
    [
        (False, True, "it is not charging"),
        (True, True, None),
        (None, True, None),
        (False, False, None),
    ],
)
def test_a_device_on_battery_declines_if_its_owner_wants_that(charging, only, reason):
    host = HostStatus(1.0, 0.0, charging, False)
    assert Limits(only_when_charging=only).find_refusal(host) == reason


def test_a_cpu_share_of_zero_is_refused():
    with pytest.raises(ValueError, match=r"cpu_share"):
        Limits(cpu_share=0.0)


@pytest.mark.parametrize(("hot", "share"), [(False, 0.3), (True, 0.15)])
def test_a_hot_machine_uses_half_of_the_allowed_share(hot, share):
    assert Limits(cpu_share=0.3).compute_cpu_share(HostStatus(2.0, 0.0, None, hot)) == share


@pytest.mark.parametrize(
    ("cores", "load", "slowdown"),
    [(2.0, None, 1.0), (2.0, 0.5, 1.0), (1.0, 3.0, 3.0), (0.25, 0.0, 4.0), (0.5, 2.0, 4.0)],
)
def test_the_slowdown_is_estimated_from_quota_and_load(cores, load, slowdown):
    host = HostStatus(cores, load, None, False)
    assert Limits().estimate_slowdown(host) == slowdown
    assert Limits(cpu_share=0.5).estimate_slowdown(host) == 2 * slowdown


def test_an_unknown_charging_state_does_not_count_as_on_battery(monkeypatch):
    battery = SimpleNamespace(power_plugged=None, percent=62.7)
    monkeypatch.setattr(psutil, "sensors_battery", lambda: battery, raising=False)
    host = read_host()
    assert (host.is_charging, host.charge) == (None, 0.63)
    assert Limits(only_when_charging=True).find_refusal(read_host()) is None
