"""The server of a split run on real devices: the simulator's loop with remote clients.

Methods, validation, ledger, records and checkpoints are the simulator's; only the clients and the
clock differ. `pliant server` starts `python -m pliant.deploy.grpc.server_main SETUP`.
"""

import logging
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec

from pliant import runtime
from pliant.data.declared import DataDeclaration
from pliant.deploy.grpc.channel import DeviceChannel
from pliant.deploy.grpc.environment import WallClockEnvironment
from pliant.deploy.grpc.frames import find_max_message_bytes
from pliant.deploy.grpc.remote_client import RemoteClient
from pliant.deploy.grpc.server import GrpcServer, GrpcServerSetup
from pliant.deploy.messages import encode_for_devices, has_own_data
from pliant.deploy.server.declarations import check_declaration
from pliant.deploy.server.presence import watch_presence
from pliant.deploy.server.rounds import POLL_SECONDS, NotEnoughDevices
from pliant.deploy.settings import MAX_WAIT_ROUNDS, SETTINGS_FILE, ServerSettings, run_process
from pliant.engine.ledger import RoundRecord
from pliant.engine.split_loop import (
    ClientTest,
    RoundEnvironment,
    check_simulated_deadline,
    run_split,
)
from pliant.engine.split_virtual import VirtualEnvironment
from pliant.experiment.build import build_session, load_server_data
from pliant.experiment.config import Experiment, load_run_config
from pliant.params import Params
from pliant.split.client import LocalClient

log = logging.getLogger("pliant")


class SplitServerRun:
    """A split experiment with its device channels and gRPC server."""

    def __init__(
        self,
        experiment: Experiment,
        settings: ServerSettings,
        *,
        address: str,
        keys: Path | None,
        server_class: type[GrpcServer] = GrpcServer,
    ) -> None:
        self._experiment, self._settings = experiment, settings
        if settings.pace == "simulated":
            check_simulated_deadline(experiment.rules)
        if experiment.split_method.slide:
            raise ValueError(
                "Expected no `slide` on real devices: a device keeps one part for the whole run, "
                f"got {', '.join(experiment.split_method.slide)}"
            )
        self._config = encode_for_devices(experiment, settings.pace)
        self.channels: dict[int, DeviceChannel] = {}
        self.clients: dict[int, RemoteClient] = {}
        self._data = None
        if has_own_data(experiment, settings.pace):
            method, holdout = experiment.split_method, experiment.server.holdout
            if holdout is not None and not method.shares_parts:
                raise ValueError(
                    "Expected no [server] holdout for a method whose clients keep their parts: "
                    f"they test on their own images, got {holdout!r}"
                )
            self._data = load_server_data(experiment)
        self._session = session = build_session(
            experiment, make_client=self._make_client, data=self._data
        )
        self.grpc_server = server_class(
            self.channels,
            address=address,
            keys=keys,
            max_message_bytes=find_max_message_bytes(session, to_device=False),
        )
        self._has_started = False

    def _make_client(self, server_copy: LocalClient) -> RemoteClient:
        number, policy = server_copy.number, self._experiment.settings.guard
        self.channels[number] = DeviceChannel(
            number, self._settings.allowance, experiment=self._config
        )
        accept = None if self._data is None else partial(self._accept_declaration, number)
        shares_part = self._experiment.split_method.shares_parts
        self.clients[number] = RemoteClient(
            self.channels[number], server_copy, policy, accept, shares_part=shares_part
        )
        return self.clients[number]

    def _accept_declaration(self, device: int, declaration: DataDeclaration | None) -> None:
        """Keep what a device declares for the run; raise if it is impossible or has changed."""
        assert self._data is not None
        limit, classes = self._experiment.server.max_samples, self._data.train.classes
        declared = self._data.declarations.setdefault(
            device, check_declaration(declaration, limit, classes)
        )
        if declaration is not None and declared != declaration:
            raise ValueError(
                f"expected the data of its first declaration, {declared.max_samples} samples, "
                f"got others, {declaration.max_samples} samples"
            )

    def run_rounds(self, folder: Path) -> Iterator[RoundRecord]:
        settings = msgspec.structs.replace(self._experiment.settings, checkpoint_every=1)
        if self._settings.pace == "measured":  # traces do not say which devices are available
            settings = msgspec.structs.replace(settings, select="uniform")
        self.grpc_server.start()
        try:
            with watch_presence(folder, self._find_online_devices):
                yield from run_split(
                    self._experiment.split_method,
                    self._session,
                    settings,
                    self._make_environment,
                    folder=folder,
                    test_client=self._choose_test(),
                )
        finally:
            self.grpc_server.close()

    def _find_online_devices(self) -> set[int]:
        return {n for n, channel in self.channels.items() if channel.process is not None}

    def _choose_test(self) -> ClientTest | None:
        """Return how clients test themselves; None if the server has their parts and images."""
        data = self._session.data
        if self._session.shares_parts and len(data.test):
            return None

        def test(client: int, server_params: Params) -> float | None:
            max_tests = len(data.get_test_indices(client))
            if self._data is not None:
                declaration = self._data.declarations.get(client)
                max_tests = 0 if declaration is None else declaration.tests
            return self.clients[client].test(server_params, max_tests)

        return test

    def _make_environment(
        self, round_number: int, start: float, selected: list[int]
    ) -> RoundEnvironment:
        self._wait_for_devices()
        experiment, round_macs = self._experiment, self._session.count_round_macs()
        fleet, settings = experiment.fleet, experiment.settings
        if self._settings.pace == "simulated":

            def has_left(client: int) -> bool:
                remote = self.clients[client]
                remote.report_problems(environment.costs[client])
                return not remote.channel.is_in_round

            environment = VirtualEnvironment(
                fleet,
                round_macs,
                settings,
                round_number,
                start,
                selected=selected,
                server_speed=experiment.server_speed,
                has_left=has_left,
            )
            return environment
        rules, deadline = settings.rules, fleet.round_seconds * MAX_WAIT_ROUNDS
        if rules.late != "wait":
            deadline = fleet.round_seconds * (1 + rules.grace)
        return WallClockEnvironment(
            fleet, round_macs, self.clients, settings.seed, selected, deadline=deadline
        )

    def _wait_for_devices(self) -> None:
        """Wait for all devices at first; for a quorum in later rounds, or after `patience`."""
        # a restarted server does not know which devices had left
        quorum = max(1, self._experiment.rules.quorum_size(len(self.clients)))
        expected = quorum if self._has_started else len(self.clients)
        end = time.monotonic() + self._settings.patience
        while (count := sum(remote.join_round() for remote in self.clients.values())) < expected:
            if time.monotonic() > end:
                if count >= quorum:
                    break
                text = f"expected {quorum} or more devices online, got {count}"
                problems = [remote.problem for remote in self.clients.values()]
                raise NotEnoughDevices("; ".join([text, *filter(None, problems)]))
            time.sleep(min(POLL_SECONDS, 0.05))
        self._has_started = True


def main(setup: GrpcServerSetup) -> None:
    log.setLevel(logging.INFO)
    runtime.raise_file_limit()  # a device is a connection
    folder = Path(setup.folder)
    keys = None if setup.keys is None else Path(setup.keys)
    settings = msgspec.json.decode((folder / SETTINGS_FILE).read_bytes(), type=ServerSettings)
    run = SplitServerRun(load_run_config(folder), settings, address=setup.address, keys=keys)
    for _ in run.run_rounds(folder):
        pass  # the records are in the folder


if __name__ == "__main__":
    run_process(main, GrpcServerSetup, (ValueError, OSError, NotEnoughDevices))
