"""Control a server's SuperLink: start its run.

The process is `python -m pliant.deploy.flower.control SETUP`, with the secret of SuperLink's
control routes in the environment; it prints the id of the new run.
"""

import os
import sys
from typing import Any

import httpx
from flwr.proto.control_pb2 import StartRunRequest, StopRunRequest
from flwr.proto.fab_pb2 import Fab
from flwr.proto.transport_pb2 import Scalar
from flwr.supercore.control.control_http_client import ControlHttpClient
from msgspec import Struct

from pliant.deploy.flower.app_bundle import APP_HASH, build_app_bundle
from pliant.deploy.settings import CONTROL_SECRET_VARIABLE, run_process


class ControlSetup(Struct, frozen=True):
    """The arguments of the process."""

    address: str
    ca: str | None
    folder: str  # of the run
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
        try:
            self._client.StopRun(StopRunRequest(run_id=run_id))
        except httpx.HTTPStatusError as error:
            if error.response.status_code not in (404, 409, 412):
                raise


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
    sys.stdout.write(f"{control.start_run(setup.folder)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    run_process(main, ControlSetup, (httpx.HTTPError, OSError, ValueError), uses_torch=False)
