"""Use pliant's methods in an existing Flower app: a ClientApp and a strategy.

    # client_app.py
    from pliant.deploy.flower.strategy import make_client_app

    app = make_client_app(Path("state"))

    # server_app.py
    from pliant.deploy.flower.strategy import PliantStrategy

    strategy = PliantStrategy(experiment)
    strategy.start(grid, strategy.arrays(), …)

Both work under `flwr run`, including simulation. Flower runs the rounds: no ledger, no records.
"""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from pliant.deploy.device.agent import DeviceAgent
from pliant.deploy.device.host import Limits
from pliant.deploy.flower.transport import FlowerTransport, extract_body, make_content
from pliant.deploy.messages import TrainRequest, encode_message
from pliant.deploy.server.reply_validation import CheckedReply, SentRequest, check_reply
from pliant.deploy.server.run_state import (
    LAST_MERGED,
    ServerRun,
    decide_merge,
    make_requests,
    select_online_devices,
)
from pliant.deploy.server.transport import RawReply
from pliant.deploy.settings import ServerSettings
from pliant.engine.local_work import WorkerContext, make_example_input
from pliant.engine.run_store import RunState
from pliant.experiment.build import build_experiment
from pliant.experiment.config import Experiment
from pliant.methods.base import ServerState
from pliant.nn.elastic import elastic
from pliant.params import get_params
from pliant.value import encode

_AGENTS: dict[tuple[str, int], DeviceAgent] = {}  # a simulation reuses its processes


def make_client_app(folder: Path, limits: Limits | None = None) -> ClientApp:
    """Return a ClientApp that trains like a pliant device, numbered by Flower's partition id."""
    app = ClientApp()

    def train(message: Message, context: Context) -> Message:
        number = int(context.node_config["partition-id"])
        key = (str(folder), number)
        if key not in _AGENTS:
            _AGENTS[key] = DeviceAgent(number, folder / str(number), limits or Limits())
        content = make_content(_AGENTS[key].handle_request(extract_body(message)))
        content["device"] = ConfigRecord({"number": number})
        return Message(content, reply_to=message)

    app.train()(train)
    return app


class PliantStrategy(Strategy):  # type: ignore[misc] # Flower's stubs are not read
    """Run any of pliant's methods as a Flower strategy, with pliant's validation of updates."""

    def __init__(self, experiment: Experiment, settings: ServerSettings | None = None) -> None:
        net, data = build_experiment(experiment)
        self._context = WorkerContext(
            elastic(net, make_example_input(data)), data, experiment.federated_method
        )
        self._hello = encode_message(TrainRequest("hello", encode(experiment), -1))
        self._experiment = experiment
        self._settings = settings or ServerSettings()
        self._run_state = RunState(0, 0.0, ServerState(get_params(net)), {})
        self._run: ServerRun | None = None
        self._requests: dict[int, SentRequest] = {}
        self._device_of_node: dict[int, int] = {}
        self._started_at = 0.0
        self.rejected: dict[int, str] = {}  # of the last round

    def arrays(self) -> ArrayRecord:
        """Return the current network as Flower arrays."""
        return ArrayRecord(self._run_state.server_state.params)

    def summary(self) -> None:
        """No summary; see the experiment file."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the messages of a round."""
        if self._run is None:
            self._transport = FlowerTransport(grid, self._hello)
            self._run = ServerRun(
                self._experiment,
                self._context,
                self._transport,
                self._settings,
                self._run_state,
                time.monotonic,
                time.sleep,
            )
        number = server_round - 1
        self._requests = make_requests(self._run, number, select_online_devices(self._run, number))
        self._started_at = time.monotonic()
        raw_requests = {device: request.raw for device, request in self._requests.items()}
        messages = self._transport.make_messages(raw_requests, round=number, seconds=3600.0)
        self._device_of_node = {
            message.metadata.dst_node_id: device for device, message in messages.items()
        }
        return list(messages.values())

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Merge the valid updates."""
        assert self._run is not None
        checked: dict[int, CheckedReply] = {}
        policy = self._experiment.guard
        for message in replies:
            device = self._device_of_node.get(message.metadata.src_node_id)
            if device is None:
                continue
            raw = None if message.has_error() else _try_extract_body(message)
            arrival = time.monotonic() - self._started_at
            checked[device] = check_reply(
                self._context, RawReply(device, raw), self._requests[device], policy, arrival
            )
        decision = decide_merge(self._run, self._requests, checked)
        self.rejected = {d: reply.outcome for d, reply in checked.items() if reply.update is None}
        merged = [reply.update for d, reply in sorted(checked.items()) if d in decision.merged]
        updates = [update for update in merged if update is not None]
        state = self._context.method.merge(
            self._context.net, self._run.run_state.server_state, updates
        )
        device_states = self._run.run_state.device_states | {
            update.device: {LAST_MERGED: torch.tensor(server_round - 1)} for update in updates
        }
        self._run_state = self._run.run_state = RunState(server_round, 0.0, state, device_states)
        losses = [update.loss for update in updates if update.loss is not None]
        metrics: dict[str, Any] = {"devices": len(updates), "refused": len(self.rejected)}
        if losses:
            metrics["loss"] = sum(losses) / len(losses)
        return self.arrays(), MetricRecord(metrics)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask no device to evaluate."""
        return []

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return nothing, as no device evaluates."""
        return None


def _try_extract_body(message: Message) -> bytes:
    try:
        return extract_body(message)
    except Exception:  # the validation reports it
        return b""
