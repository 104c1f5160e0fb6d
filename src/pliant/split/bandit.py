"""The orchestrator's bandit: discounted upper confidence bounds on the clients' server losses.

Chopra et al., AdaSplit, 2021, after Cho et al., "Bandit-based communication-efficient client
selection strategies for federated learning", 2020.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from pliant.devices.draws import FloatArray
from pliant.params import Params

HOPE = 100.0  # the loss of a client that nobody has asked yet
ROWS = 2048  # of the history that count
_TINY = 1e-15


class Bandit:
    """Discounted sums of losses and selections; they hold all that the history is asked for.

    A client that is not selected is given the mean of its last two losses, which count in the sum
    of losses but not in that of selections: so its score rises until it is selected.

    >>> from pliant.split.bandit import Bandit
    >>> bandit = Bandit(2, discount=0.5)
    >>> bandit.learn({0: 1.0})
    >>> bandit.losses.tolist(), bandit.chosen.tolist()
    ([51.0, 150.0], [1.0, 0.0])
    """

    def __init__(self, clients: int, discount: float) -> None:
        self.discount = discount
        self.losses = np.full(clients, HOPE)
        self.chosen = np.zeros(clients)
        self.last = np.full((2, clients), HOPE)  # the newest row first
        self.rows = 1

    def learn(self, losses: Mapping[int, float]) -> None:
        """Add a row: the losses of the clients that were selected."""
        row = self.last.mean(axis=0)
        bits = np.zeros(len(row))
        for client, loss in losses.items():
            row[client], bits[client] = loss, 1.0
        self.losses = self.discount * self.losses + row
        self.chosen = self.discount * self.chosen + bits
        self.last = np.stack([row, self.last[0]])
        self.rows = min(self.rows + 1, ROWS)

    def scores(self) -> FloatArray:
        """Return each client's upper confidence bound."""
        chosen = self.chosen + _TINY
        bound: FloatArray = self.losses / chosen + np.sqrt(2 * np.log(self.rows) / chosen)
        return bound

    def state(self) -> Params:
        """Return everything as tensors."""
        table = np.stack([self.losses, self.chosen, *self.last])
        return {"table": torch.from_numpy(table.copy()), "rows": torch.tensor(self.rows)}

    def restore(self, state: Params) -> None:
        """Go on from what `state` returned."""
        table = state["table"].numpy().copy()
        self.losses, self.chosen, self.last = table[0], table[1], table[2:]
        self.rows = int(state["rows"])


def best(
    scores: FloatArray | Sequence[float],
    among: Iterable[int],
    count: int,
    rng: np.random.Generator,
) -> list[int]:
    """Return the clients of the highest scores among some, ties at random, in rising order."""
    shuffled = rng.permutation(np.array(sorted(among), np.int64))
    order = np.argsort(-np.asarray(scores)[shuffled], kind="stable")
    return sorted(shuffled[order[:count]].tolist())
