"""The bandit that selects clients: discounted upper confidence bounds on their server losses.

Chopra et al., AdaSplit, 2021, after Cho et al., "Bandit-based communication-efficient client
selection strategies for federated learning", 2020.
"""

from collections.abc import Iterable, Mapping

import numpy as np
import torch

from pliant.devices.vector_rng import FloatArray
from pliant.params import Params

INITIAL_LOSS = 100.0  # of a client that was never selected
MAX_HISTORY = 2048  # rows that count
_EPSILON = 1e-15


class Bandit:
    """Discounted sums of losses and selections.

    A client that is not selected gets the mean of its last two losses. It enters the sum of losses
    but not that of selections, so the client's score rises until it is selected.

    >>> from pliant.split.bandit import Bandit
    >>> bandit = Bandit(2, discount=0.5)
    >>> bandit.update({0: 1.0})
    >>> bandit.losses.tolist(), bandit.selections.tolist()
    ([51.0, 150.0], [1.0, 0.0])
    """

    def __init__(self, clients: int, discount: float) -> None:
        self.discount = discount
        self.losses = np.full(clients, INITIAL_LOSS)
        self.selections = np.zeros(clients)
        self.last_losses = np.full((2, clients), INITIAL_LOSS)  # newest row first
        self.history_length = 1

    def update(self, losses: Mapping[int, float]) -> None:
        """Add the losses of the selected clients to the history."""
        row = self.last_losses.mean(axis=0)
        is_selected = np.zeros(len(row))
        for client, loss in losses.items():
            row[client], is_selected[client] = loss, 1.0
        self.losses = self.discount * self.losses + row
        self.selections = self.discount * self.selections + is_selected
        self.last_losses = np.stack([row, self.last_losses[0]])
        self.history_length = min(self.history_length + 1, MAX_HISTORY)

    def compute_scores(self) -> FloatArray:
        """Return each client's upper confidence bound."""
        count = self.selections + _EPSILON
        bound: FloatArray = self.losses / count + np.sqrt(2 * np.log(self.history_length) / count)
        return bound

    def state_dict(self) -> Params:
        table = np.stack([self.losses, self.selections, *self.last_losses])
        return {"table": torch.from_numpy(table.copy()), "rows": torch.tensor(self.history_length)}

    def load_state_dict(self, state: Params) -> None:
        table = state["table"].numpy().copy()
        self.losses, self.selections, self.last_losses = table[0], table[1], table[2:]
        self.history_length = int(state["rows"])


def select_top_clients(
    scores: FloatArray, candidates: Iterable[int], count: int, rng: np.random.Generator
) -> list[int]:
    """Return the candidates with the highest scores, sorted; break ties at random."""
    shuffled = rng.permutation(np.array(sorted(candidates), np.int64))
    order = np.argsort(-scores[shuffled], kind="stable")
    return sorted(shuffled[order[:count]].tolist())
