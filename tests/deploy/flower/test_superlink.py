"""The routes of a real SuperLink over HTTP, seen from this machine and from others."""

import asyncio

import httpx
import pytest

# importing Flower's old Typer warns under a new Click
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

OPEN = ["/v1/fleet/pull-messages", "/v1/fleet/push-messages", "/health"]
CLOSED = ["/v1/control/start-run", "/v1/control/list-runs", "/v1/runtime/push-messages", "/docs"]
CLOSED += ["/openapi.json", "/v1/fleetwide", "/v1/control/../fleet", "//v1/control/start-run"]


@pytest.fixture(scope="module")
def app():
    """Return the app that `python -m pliant.deploy.flower.superlink` would serve."""
    import flwr.superlink.cli
    import flwr.superlink.main

    from pliant.deploy.flower import superlink

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flwr.superlink.main, "create_app", flwr.superlink.main.create_app)
        patch.setattr(flwr.superlink.cli, "flower_superlink", lambda: None)
        superlink.main()
        return flwr.superlink.main.create_app()


def post(app, path, client, server="10.0.0.1"):
    """Return the status and the body of a response to a client with this address."""

    async def request():
        transport = httpx.ASGITransport(app, client=(client, 1234))
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{server}") as session:
            return await session.post(path)

    response = asyncio.run(request())
    return response.status_code, response.text


@pytest.mark.parametrize("path", OPEN)
def test_other_machines_reach_the_fleet_routes(app, path):
    assert post(app, path, "10.0.0.7") == post(app, path, "127.0.0.1")
    assert post(app, path, "10.0.0.7")[0] not in (403, 404)


@pytest.mark.parametrize("path", CLOSED)
@pytest.mark.parametrize("client", ["10.0.0.7", "unknown", "::ffff:10.0.0.7"])
def test_other_machines_reach_no_other_route(app, path, client):
    assert post(app, path, client) == (403, "closed to other machines\n")


@pytest.mark.parametrize("path", ["/v1/control/start-run", "/v1/runtime/push-messages"])
@pytest.mark.parametrize("client", ["127.0.0.1", "::1", "10.0.0.1"])
def test_this_machine_reaches_all_routes_from_any_of_its_addresses(app, path, client):
    assert post(app, path, client)[0] not in (403, 404)


def test_a_client_without_an_address_is_refused(app):
    responses = []
    scope = {"type": "http", "method": "POST", "path": "/v1/control/start-run", "client": None}
    scope |= {"headers": [], "query_string": b"", "server": ("10.0.0.1", 9092)}

    async def send(message):
        responses.append(message)

    asyncio.run(app(scope, None, send))
    assert responses[0]["status"] == 403
