"""Use pliant's methods in an existing Flower app: a ClientApp and a strategy.

Both work under `flwr run`, including simulation; `examples/flower_app` is a complete app. Flower
runs the rounds: no ledger, no records.
"""

from collections.abc import Iterable
from pathlib import Path
from secrets import randbits

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from pliant.deploy.device.agent import DeviceAgent
from pliant.deploy.device.host import Limits
from pliant.deploy.flower.client_app import extract_body, make_content
from pliant.deploy.flower.transport import FlowerTransport, read_reply
from pliant.deploy.messages import TrainRequest, encode_for_devices, encode_message, has_own_data
from pliant.deploy.server.rounds import DeviceTransport, make_run
from pliant.deploy.settings import ServerSettings
from pliant.engine.round_loop import finish_round
from pliant.experiment.build import build_run_context, build_server_context
from pliant.experiment.config import Experiment
from pliant.methods.verbs import RunsAsynchronously

_AGENTS: dict[tuple[str, int], DeviceAgent] = {}  # a simulation reuses its processes


def make_client_app(folder: Path, limits: Limits | None = None) -> ClientApp:
    """Return a ClientApp that trains like a pliant device, numbered by Flower's partition id."""
    app = ClientApp()

    def train(message: Message, context: Context) -> Message:
        number = int(context.node_config["partition-id"])
        key = (str(folder), number)
        if key not in _AGENTS:
            _AGENTS[key] = DeviceAgent(number, folder / str(number), limits or Limits())
        raw = _AGENTS[key].handle_request(extract_body(message))
        return Message(make_content(raw, device=number), reply_to=message)

    app.train()(train)
    return app


class PliantStrategy(Strategy):  # type: ignore[misc] # Flower's stubs are not read
    """Run any of pliant's methods as a Flower strategy, with pliant's validation of updates."""

    def __init__(self, experiment: Experiment, settings: ServerSettings | None = None) -> None:
        if isinstance(experiment.federated_method, RunsAsynchronously):
            kind = type(experiment.method).__name__
            raise ValueError(f"Expected a method with rounds, as Flower's strategies, got {kind}")
        self._experiment = experiment
        self._settings = settings or ServerSettings()
        is_own = has_own_data(experiment, self._settings.pace)
        build = build_server_context if is_own else build_run_context
        seed = None if experiment.privacy is None else randbits(128)
        self._run = make_run(experiment, build(experiment), secret_seed=seed)
        self._transport: DeviceTransport | None = None
        self.rejected: dict[int, str] = {}  # of the last round

    def arrays(self) -> ArrayRecord:
        return ArrayRecord(self._run.state.trained_params)

    def summary(self) -> None:
        """No summary; see the experiment file."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        if self._transport is None:
            hello = encode_message(TrainRequest("hello", encode_for_devices(self._experiment), -1))
            self._flower = FlowerTransport(grid, hello)
            self._transport = DeviceTransport(self._experiment, self._settings, self._flower)
        devices = self._transport.select(self._run)
        requests = self._transport.prepare(self._run, devices)
        messages = self._flower.make_messages(
            requests, round=self._run.state.next_round, seconds=3600.0
        )
        return list(messages.values())

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        assert self._transport is not None
        for message in replies:
            device = self._flower.device_of_node.get(message.metadata.src_node_id)
            if device in self._transport.requests:
                self._transport.receive(self._run, read_reply(device, message))
        checked = self._transport.replies.items()
        self.rejected = {device: reply.outcome for device, reply in checked if not reply.update}
        record = finish_round(self._run, self._transport.close(self._run))
        metrics = {"devices": record.merged, "refused": len(self.rejected), "loss": record.loss}
        if record.score is not None:
            metrics["accuracy"] = record.score.accuracy
        return self.arrays(), MetricRecord({k: v for k, v in metrics.items() if v is not None})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return []

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        return None
