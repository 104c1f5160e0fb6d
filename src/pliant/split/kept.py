"""Activations that the server keeps, so that a part that does not change sends each one once."""

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from pliant.data import FederatedData
from pliant.params import Params
from pliant.split.server import LabelledActivations

T = TypeVar("T")


class KeptActivations:
    """The activations and labels of clients' training images, in a state that can be saved.

    A client's images are counted from 0.
    """

    def __init__(
        self,
        get_state: Callable[[], dict[str, Params]],  # a rolled-back round replaces the state
        data: FederatedData,
        shape: tuple[int, ...],
        limit: int,
    ) -> None:
        self._get_state, self._data, self._shape, self._limit = get_state, data, shape, limit
        self._check_limit()

    def _check_limit(self) -> None:
        samples = sum(map(self._data.count_samples, range(len(self._data))))
        size = 4 * torch.Size(self._shape).numel() * samples
        if size > self._limit:
            raise ValueError(
                f"Expected send_once of at least {size} bytes for the activations of all training "
                f"images, got {self._limit}"
            )

    def has_all(self, client: int, images: Tensor) -> bool:
        kept = self._get_state().get(_get_name(client))
        return kept is not None and bool(kept["is_kept"][images].all())

    def put(self, client: int, images: Tensor, batch: LabelledActivations | None) -> None:
        """Keep a mini-batch, or in a dry run only that it was sent."""
        state, name, samples = (
            self._get_state(),
            _get_name(client),
            self._data.count_samples(client),
        )
        if name not in state:
            self._check_limit()  # devices with their own data have told how much it is by now
            state[name] = {"is_kept": torch.zeros(samples, dtype=torch.uint8)}
        kept = state[name]
        kept["is_kept"][images] = 1
        if batch is not None:
            kept.setdefault("activations", torch.zeros(samples, *self._shape))[images] = batch[0]
            kept.setdefault("labels", torch.zeros(samples, dtype=torch.int64))[images] = batch[1]

    def get(self, client: int, images: Tensor) -> LabelledActivations:
        kept = self._get_state()[_get_name(client)]
        return kept["activations"][images], kept["labels"][images]

    def list_images(self) -> dict[int, Tensor]:
        """Return all images whose activations are kept, by client."""
        state = self._get_state()
        names = {client: _get_name(client) for client in range(len(self._data))}
        return {
            client: torch.nonzero(state[name]["is_kept"]).flatten()
            for client, name in names.items()
            if name in state
        }

    def clear(self) -> None:
        for client in range(len(self._data)):
            self._get_state().pop(_get_name(client), None)


def shuffle_images(
    images: Mapping[int, Tensor], size: int, rng: np.random.Generator
) -> list[dict[int, Tensor]]:
    """Shuffle the images of clients into mini-batches, each grouped by client."""
    if not images:
        return []
    owners = torch.cat([torch.full((len(own),), client) for client, own in images.items()])
    pooled = torch.cat(list(images.values()))
    order = torch.from_numpy(rng.permutation(len(pooled)))
    batches = []
    for rows in torch.split(order, size):
        clients = sorted(set(owners[rows].tolist()))
        batches.append({client: pooled[rows[owners[rows] == client]] for client in clients})
    return batches


def interleave(lists: Iterable[list[T]]) -> list[T]:
    """Merge lists so that the items of each are spread evenly.

    >>> from pliant.split.kept import interleave
    >>> interleave([["a", "a", "a", "a"], ["b", "b"], ["c"]])
    ['a', 'b', 'a', 'c', 'a', 'b', 'a']
    """
    places = [
        ((index + 0.5) / len(items), number, item)
        for number, items in enumerate(lists)
        for index, item in enumerate(items)
    ]
    return [item for *_, item in sorted(places, key=lambda place: place[:2])]


def check_repeatable(part: nn.Module) -> None:
    """Refuse a part whose activations of an image differ from one mini-batch to the next."""
    for name, module in part.named_modules():
        if isinstance(module, _BatchNorm | _DropoutNd):
            raise ValueError(
                "Expected a client's part that gives an image the same activations in every "
                f"mini-batch if they are sent once, got {type(module).__name__} at {name!r}"
            )


def _get_name(client: int) -> str:
    return f"kept{client}"
