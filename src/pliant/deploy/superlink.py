"""Flower's SuperLink with its control routes closed to other machines.

Flower serves devices, runs and control on one port, and asks nobody for a credential at the control
routes. Devices need only the fleet's routes: the others answer on loopback alone.
"""

from collections.abc import Awaitable, Callable, MutableMapping
from ipaddress import ip_address
from typing import Any

FLEET = ("/v1/fleet/", "/health")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class FleetOnly:
    """Answer 403 to other machines that ask for more than the fleet's routes."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not is_allowed(scope):
            await send({"type": "http.response.start", "status": 403, "headers": []})
            await send({"type": "http.response.body", "body": b"closed to other machines\n"})
            return
        await self.app(scope, receive, send)


def is_allowed(scope: Scope) -> bool:
    """Tell whether a request is for the fleet, or comes from this machine."""
    if any(str(scope["path"]).startswith(head) for head in FLEET):
        return True
    client, server = scope.get("client"), scope.get("server")
    try:
        is_here = client is not None and ip_address(client[0]).is_loopback
    except ValueError:
        return False
    # who calls from the address that was called is this machine: another's answer would not arrive
    return is_here or (client is not None and server is not None and client[0] == server[0])


def main() -> None:
    """Run SuperLink with the options that Flower's own command takes."""
    import flwr.superlink.main as superlink
    from flwr.superlink.cli import flower_superlink

    make = superlink.create_app

    def guarded(*arguments: Any) -> Any:
        app = make(*arguments)
        app.add_middleware(FleetOnly)
        return app

    superlink.create_app = guarded
    flower_superlink()


if __name__ == "__main__":
    main()
