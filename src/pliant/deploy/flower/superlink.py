"""Run Flower's SuperLink with its control routes closed to other machines.

Flower serves devices, runs and control on one port, and its control routes require no credentials.
Devices need only the fleet routes, so all others are restricted to this machine.
"""

from ipaddress import ip_address
from typing import Any

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

FLEET_ROUTES = ("/v1/fleet/", "/health")


class FleetOnlyMiddleware:
    """Answer 403 to other machines on all but the fleet routes."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_refused = scope["type"] == "http" and not is_allowed(scope)
        app = PlainTextResponse("closed to other machines\n", 403) if is_refused else self.app
        await app(scope, receive, send)


def is_allowed(scope: Scope) -> bool:
    """Return whether a request is for a fleet route or comes from this machine."""
    if any(str(scope["path"]).startswith(prefix) for prefix in FLEET_ROUTES):
        return True
    client, server = scope.get("client"), scope.get("server")
    try:
        is_loopback = client is not None and ip_address(client[0]).is_loopback
    except ValueError:
        return False
    # a client with the server's own address is this machine: replies to others would not arrive
    return is_loopback or (client is not None and server is not None and client[0] == server[0])


def main() -> None:
    import flwr.superlink.main as superlink
    from flwr.superlink.cli import flower_superlink

    create_app = superlink.create_app

    def create_guarded_app(*arguments: Any) -> Any:
        app = create_app(*arguments)
        app.add_middleware(FleetOnlyMiddleware)
        return app

    superlink.create_app = create_guarded_app
    flower_superlink()


if __name__ == "__main__":
    main()
