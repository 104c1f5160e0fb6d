"""The ledger of a split round: what each client did, cost, and how it ended."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor, count_nonzero

from pliant.engine.ledger import MERGED_OUTCOMES, ExchangeRecord, TaskRecord
from pliant.split.payload import Message, Payload, label_dtype
from pliant.split.validation import MessageManifest, decode_message


@dataclass
class ClientCosts:
    """The running costs of one client in a round."""

    macs: float = 0.0
    samples: int = 0
    steps: int = 0
    up: int = 0
    down: int = 0
    busy: float = 0.0
    waited: float = 0.0
    forward: float = 0.0
    server: float = 0.0
    uplinks: int = 0
    dense: int = 0
    nonzero: int = 0
    relayed: int = 0
    losses: list[float] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    has_left: bool = False


class ClientLedger:
    """The costs of all clients, and the validation of their messages."""

    def __init__(self, classes: int, client_classes: list[frozenset[int]], max_abs: float) -> None:
        self.costs = [ClientCosts() for _ in client_classes]
        self._classes, self._client_classes, self._max_abs = classes, client_classes, max_abs

    def count_bytes(self, message: object, shape: tuple[int, ...], payload: Payload) -> int:
        """Return the bytes of a message; those of a dense one if it is not a valid message."""
        if isinstance(message, Message):
            return message.size
        labels = shape[0] * np.dtype(label_dtype(self._classes)).itemsize
        return payload.dense_size(int(np.prod(shape))) + labels

    def record_dry_message(self, client: int, shape: tuple[int, ...]) -> None:
        """Count a message of a dry run as dense."""
        costs = self.costs[client]
        costs.uplinks += 1
        costs.dense += 4 * int(np.prod(shape))
        costs.nonzero += 4 * int(np.prod(shape))

    def receive(
        self, client: int, message: object, shape: tuple[int, ...], payload: Payload
    ) -> tuple[Tensor, Tensor] | None:
        """Count a message and return its activations and labels if valid."""
        costs = self.costs[client]
        costs.uplinks += 1
        costs.dense += 4 * int(np.prod(shape))
        client_classes = self._client_classes[client]
        manifest = MessageManifest(
            client, shape, self._classes, client_classes, payload, self._max_abs
        )
        decoded = decode_message(message, manifest)
        if isinstance(decoded, str):
            costs.refused[decoded] += 1
            return None
        costs.nonzero += 4 * int(count_nonzero(decoded[0]))
        return decoded

    def build_record(
        self, round_number: int, client: int, available: float, joules: float
    ) -> TaskRecord:
        """Return a client's task record."""
        costs = self.costs[client]
        refused = sum(costs.refused.values())
        if refused and refused >= costs.uplinks:
            outcome = f"rejected: {next(iter(costs.refused))}"
        elif costs.has_left:
            outcome = "partial" if costs.steps else "dropped"
        else:
            outcome = "finished" if costs.steps else "dropped"
        is_merged = outcome in MERGED_OUTCOMES
        losses = costs.losses
        return TaskRecord(
            round=round_number,
            device=client,
            outcome=outcome,
            samples=costs.samples if is_merged else 0,
            steps=costs.steps if is_merged else 0,
            macs=costs.macs,
            useful=costs.macs if is_merged else 0.0,
            available=max(available, costs.macs),
            down=costs.down,
            up=costs.up,
            seconds=costs.busy,
            joules=joules,
            loss=sum(losses) / len(losses) if losses else None,
            exchange=ExchangeRecord(
                forward=costs.forward,
                server=costs.server,
                uplinks=costs.uplinks,
                dense=costs.dense,
                nonzero=costs.nonzero,
                relayed=costs.relayed,
                waited=costs.waited,
                refused=dict(costs.refused),
            ),
        )
