"""Activations that the server keeps, so that a part that does not change sends each one once."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from pliant.data import FederatedData
from pliant.params import Params
from pliant.split.server import LabelledActivations


class KeptActivations:
    """The activations and labels of clients' training images, in a state that can be saved.

    Images are named by their indices in the data.
    """

    def __init__(
        self,
        get_state: Callable[[], dict[str, Params]],  # a rolled-back round replaces the state
        data: FederatedData,
        shape: tuple[int, ...],
        limit: int,
    ) -> None:
        size = 4 * torch.Size(shape).numel() * sum(map(len, data.shares))
        if size > limit:
            raise ValueError(
                f"Expected send_once of at least {size} bytes for the activations of all training "
                f"images, got {limit}"
            )
        self._get_state, self._data, self._shape = get_state, data, shape

    def has_all(self, client: int, images: Tensor) -> bool:
        kept = self._get_state().get(_get_name(client))
        return kept is not None and bool(kept["is_kept"][self._locate(client, images)].all())

    def put(self, client: int, images: Tensor, batch: LabelledActivations | None) -> None:
        """Keep a mini-batch, or in a dry run only that it was sent."""
        samples = len(self._data.shares[client])
        kept = self._get_state().setdefault(
            _get_name(client), {"is_kept": torch.zeros(samples, dtype=torch.uint8)}
        )
        rows = self._locate(client, images)
        kept["is_kept"][rows] = 1
        if batch is not None:
            kept.setdefault("activations", torch.zeros(samples, *self._shape))[rows] = batch[0]
            kept.setdefault("labels", torch.zeros(samples, dtype=torch.int64))[rows] = batch[1]

    def get(self, client: int, images: Tensor) -> LabelledActivations:
        kept, rows = self._get_state()[_get_name(client)], self._locate(client, images)
        return kept["activations"][rows], kept["labels"][rows]

    def list_images(self) -> dict[int, Tensor]:
        """Return the indices of all images whose activations are kept, by client."""
        images = {}
        for client, share in enumerate(self._data.shares):
            kept = self._get_state().get(_get_name(client))
            if kept is not None:
                images[client] = torch.from_numpy(np.asarray(share))[kept["is_kept"].bool()]
        return images

    def clear(self) -> None:
        for client in range(len(self._data)):
            self._get_state().pop(_get_name(client), None)

    def _locate(self, client: int, images: Tensor) -> Tensor:
        share = np.asarray(self._data.shares[client])
        order = np.argsort(share, kind="stable")
        return torch.from_numpy(order[np.searchsorted(share[order], images.numpy())])


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
