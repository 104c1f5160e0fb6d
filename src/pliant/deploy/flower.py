"""For existing Flower apps: a ClientApp and a strategy that run pliant's methods in them.

    # client_app.py                                # server_app.py
    from pliant.deploy.flower import client_app    from pliant.deploy.flower import PliantStrategy
    app = client_app(Path("state"))                strategy = PliantStrategy(experiment)
                                                   strategy.start(grid, strategy.arrays(), …)

Both halves work under `flwr run`, in simulation too. Rounds are Flower's: no ledger, no records.
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

from pliant.deploy.desk import MERGED, Desk, asks_of, chosen_devices, judged
from pliant.deploy.device import Device
from pliant.deploy.host import Limits
from pliant.deploy.inbox import Ask, Received, accept
from pliant.deploy.letters import Order, packed
from pliant.deploy.link import FlowerLink, body, content
from pliant.deploy.post import Reply
from pliant.deploy.service import Service
from pliant.engine.job import World, example_of
from pliant.engine.store import Saved
from pliant.experiment import Experiment, build
from pliant.methods.base import State
from pliant.nn.elastic import elastic
from pliant.params import params_of
from pliant.value import encode

_RESIDENT: dict[tuple[str, int], Device] = {}  # a simulation keeps its processes


def client_app(folder: Path, limits: Limits | None = None) -> ClientApp:
    """Return a ClientApp that trains as pliant's devices do, by Flower's partition id."""
    app = ClientApp()

    def train(message: Message, context: Context) -> Message:
        number = int(context.node_config["partition-id"])
        key = (str(folder), number)
        if key not in _RESIDENT:
            _RESIDENT[key] = Device(number, folder / str(number), limits or Limits())
        answer = _RESIDENT[key].answer(body(message))
        found = content(answer)
        found["device"] = ConfigRecord({"number": number})
        return Message(found, reply_to=message)

    app.train()(train)
    return app


class PliantStrategy(Strategy):  # type: ignore[misc] # Flower's stubs are not read
    """Any of pliant's methods as a Flower strategy, behind pliant's guard."""

    def __init__(self, experiment: Experiment, service: Service | None = None) -> None:
        net, data = build(experiment)
        world = World(elastic(net, example_of(data)), data, experiment.federated)
        self._hello = packed(Order("hello", encode(experiment), -1))
        self._experiment = experiment
        self._world = world
        self._service = service or Service()
        self._saved = Saved(0, 0.0, State(params_of(net)), {})
        self._desk: Desk | None = None
        self._asks: dict[int, Ask] = {}
        self._nodes: dict[int, int] = {}
        self._began = 0.0
        self.refused: dict[int, str] = {}  # of the last round

    def arrays(self) -> ArrayRecord:
        """Return the network as it is, as Flower carries it."""
        return ArrayRecord(self._saved.state.params)

    def summary(self) -> None:
        """Say nothing: the experiment says it all."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the letters of a round."""
        if self._desk is None:
            self._link = FlowerLink(grid, self._hello)
            self._desk = Desk(
                self._experiment,
                self._world,
                self._link,
                self._service,
                self._saved,
                time.monotonic,
                time.sleep,
            )
        number = server_round - 1
        self._asks = asks_of(self._desk, number, chosen_devices(self._desk, number))
        self._began = time.monotonic()
        letters = {device: ask.letter for device, ask in self._asks.items()}
        messages = self._link.messages(letters, round=number, seconds=3600.0)
        self._nodes = {message.metadata.dst_node_id: device for device, message in messages.items()}
        return list(messages.values())

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Merge what the guard lets through."""
        assert self._desk is not None
        received: dict[int, Received] = {}
        policy = self._experiment.guard
        for message in replies:
            device = self._nodes.get(message.metadata.src_node_id)
            if device is None:
                continue
            raw = None if message.has_error() else _body(message)
            arrival = time.monotonic() - self._began
            got = accept(self._world, Reply(device, raw), self._asks[device], policy, arrival)
            received[device] = got
        verdict = judged(self._desk, self._asks, received)
        self.refused = {d: got.end for d, got in received.items() if got.update is None}
        counted = [got.update for d, got in sorted(received.items()) if d in verdict.counted]
        updates = [update for update in counted if update is not None]
        state = self._world.method.merge(self._world.net, self._desk.saved.state, updates)
        marks = {u.device: {MERGED: torch.tensor(server_round - 1)} for u in updates}
        memory = self._desk.saved.memory | marks
        self._saved = self._desk.saved = Saved(server_round, 0.0, state, memory)
        losses = [update.loss for update in updates if update.loss is not None]
        metrics = {"devices": len(updates), "refused": len(self.refused)}
        told: dict[str, Any] = metrics | ({"loss": sum(losses) / len(losses)} if losses else {})
        return self.arrays(), MetricRecord(told)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask no device to evaluate."""
        return []

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return nothing, as nothing was asked."""
        return None


def _body(message: Message) -> bytes:
    try:
        return body(message)
    except Exception:  # the guard names it
        return b""
