"""The book of a split round: what each client has done and cost, and how it ended."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor, count_nonzero

from pliant.engine.ledger import Exchange, TaskRecord
from pliant.split.guard import Manifest, received
from pliant.split.payload import Message, Payload, label_type


@dataclass
class Account:
    """What a client has done and cost in a round."""

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


class Book:
    """The accounts of all clients, with the guard that what they send has to pass."""

    def __init__(self, classes: int, owned: list[frozenset[int]], largest: float) -> None:
        self.accounts = [Account() for _ in owned]
        self._classes, self._owned, self._largest = classes, owned, largest

    def size(self, arrived: object, shape: tuple[int, ...], payload: Payload) -> int:
        """Return the bytes of what has arrived; of what is no message, those of a dense one."""
        if isinstance(arrived, Message):
            return arrived.size
        labels = shape[0] * np.dtype(label_type(self._classes)).itemsize
        return payload.dense(int(np.prod(shape))) + labels

    def suppose(self, client: int, shape: tuple[int, ...]) -> None:
        """Count a message of a dry run, which has no zeros."""
        account = self.accounts[client]
        account.uplinks += 1
        account.dense += 4 * int(np.prod(shape))
        account.nonzero += 4 * int(np.prod(shape))

    def receive(
        self, client: int, arrived: object, shape: tuple[int, ...], payload: Payload
    ) -> tuple[Tensor, Tensor] | None:
        """Count a message and return what the guard lets through."""
        account = self.accounts[client]
        account.uplinks += 1
        account.dense += 4 * int(np.prod(shape))
        owned = self._owned[client]
        manifest = Manifest(client, shape, self._classes, owned, payload, self._largest)
        got = received(arrived, manifest)
        if isinstance(got, str):
            account.refused[got] += 1
            return None
        account.nonzero += 4 * int(count_nonzero(got[0]))
        return got

    def record(self, number: int, client: int, available: float, energy: float) -> TaskRecord:
        """Return a client's line in the ledger."""
        account = self.accounts[client]
        refused = sum(account.refused.values())
        if refused and refused >= account.uplinks:
            end = f"rejected: {next(iter(account.refused))}"
        elif account.has_left:
            end = "partial" if account.steps else "dropped"
        else:
            end = "finished" if account.steps else "dropped"
        counts = end in ("finished", "partial")
        losses = account.losses
        return TaskRecord(
            round=number,
            device=client,
            end=end,
            samples=account.samples if counts else 0,
            steps=account.steps if counts else 0,
            macs=account.macs,
            useful=account.macs if counts else 0.0,
            available=max(available, account.macs),
            down=account.down,
            up=account.up,
            seconds=account.busy,
            joules=energy,
            loss=sum(losses) / len(losses) if losses else None,
            exchange=Exchange(
                forward=account.forward,
                server=account.server,
                uplinks=account.uplinks,
                dense=account.dense,
                nonzero=account.nonzero,
                relayed=account.relayed,
                waited=account.waited,
                refused=dict(account.refused),
            ),
        )
