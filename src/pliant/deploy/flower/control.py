"""Control a server's SuperLink: register its devices' keys, and start its run.

The process is `python -m pliant.deploy.flower.control SETUP`, with the secret of SuperLink's
control routes in the environment; it prints the id of the new run.
"""

import os
import sys
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from flwr.proto.control_pb2 import (
    RegisterNodeRequest,
    StartRunRequest,
    StopRunRequest,
    UnregisterNodeRequest,
)
from flwr.proto.fab_pb2 import Fab
from flwr.proto.transport_pb2 import Scalar
from flwr.supercore.control.control_http_client import ControlHttpClient
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from msgspec import Struct

from pliant.deploy.flower.app_bundle import APP_HASH, build_app_bundle
from pliant.deploy.security.node_registry import register_devices
from pliant.deploy.settings import CONTROL_SECRET_VARIABLE, run_process


class ControlSetup(Struct, frozen=True):
    """The arguments of the process."""

    address: str
    ca: str | None
    folder: str  # of the run
    keys: str | None  # whose devices are registered
    registry: str  # file that lists them
    last_run: int | None  # to stop first


class ControlClient:
    """Call the control routes of a SuperLink that requires a secret."""

    def __init__(self, address: str, ca: str | None, secret: str) -> None:
        interceptors = [_SecretInterceptor(secret)]
        self._client = ControlHttpClient.from_server_address(address, ca is None, ca, interceptors)

    def start_run(self, folder: str) -> int:
        """Start pliant's app on a run folder and return the id of Flower's run."""
        fab = Fab(hash_str=APP_HASH, content=build_app_bundle())
        config = {"folder": Scalar(string=folder)}
        response = self._client.StartRun(StartRunRequest(fab=fab, override_config=config))
        return int(response.run_id)

    def stop_run(self, run_id: int) -> None:
        """Stop a run, which may have ended."""
        self._call_unless_done(self._client.StopRun, StopRunRequest(run_id=run_id))

    def register_device(self, public_key: Path, name: str) -> int | None:
        """Register a key and return its node; None if it is registered already."""
        key: Any = load_ssh_public_key(public_key.read_bytes())
        request = RegisterNodeRequest(public_key=public_key_to_bytes(key), name=name)
        response = self._call_unless_done(self._client.RegisterNode, request)
        return None if response is None else int(response.node_id)

    def unregister_device(self, node: int) -> None:
        """Unregister a node, which may be gone."""
        self._call_unless_done(self._client.UnregisterNode, UnregisterNodeRequest(node_id=node))

    def _call_unless_done(self, call: Any, request: Any) -> Any:
        try:
            return call(request)
        except httpx.HTTPStatusError as error:
            if error.response.status_code not in (404, 409, 412):
                raise
            return None


class _SecretInterceptor:
    """Add the server's secret to each request."""

    def __init__(self, secret: str) -> None:
        self._secret = secret

    def intercept(self, context: Any, call_next: Any) -> Any:
        context.request.headers["Authorization"] = f"Bearer {self._secret}"
        return call_next(context)


def main(setup: ControlSetup) -> None:
    control = ControlClient(setup.address, setup.ca, os.environ.pop(CONTROL_SECRET_VARIABLE))
    if setup.last_run is not None:
        control.stop_run(setup.last_run)
    elif setup.keys is not None:
        register_devices(Path(setup.keys), Path(setup.registry), control)
    sys.stdout.write(f"{control.start_run(setup.folder)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    run_process(main, ControlSetup, (httpx.HTTPError, OSError, ValueError), uses_torch=False)
