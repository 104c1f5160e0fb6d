import pytest

from pliant.deploy.flower.superlink import is_allowed


@pytest.mark.parametrize(
    ("path", "client", "allowed"),
    [
        ("/v1/fleet/pull-messages", "10.0.0.7", True),
        ("/v1/control/start-run", "10.0.0.7", False),
        ("/v1/control/start-run", "127.0.0.1", True),
        ("/v1/control/start-run", "::1", True),
        ("/v1/runtime/push-messages", "10.0.0.7", False),
        ("/docs", "10.0.0.7", False),
        ("/v1/control/start-run", "unknown", False),
        ("/v1/fleetwide", "10.0.0.7", False),
    ],
)
def test_other_machines_reach_the_fleet_routes_only(path, client, allowed):
    assert is_allowed({"path": path, "client": (client, 1234)}) == allowed


def test_a_client_without_an_address_is_refused():
    assert not is_allowed({"path": "/v1/control/start-run", "client": None})


@pytest.mark.parametrize(("server", "allowed"), [("10.0.0.7", True), ("10.0.0.8", False)])
def test_this_machine_may_use_its_own_address(server, allowed):
    scope = {
        "path": "/v1/control/start-run",
        "client": ("10.0.0.7", 1234),
        "server": (server, 9092),
    }
    assert is_allowed(scope) == allowed
