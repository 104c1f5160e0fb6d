"""The guard in front of the server's part: which activations may be trained on, and why not others.

A message that is refused is as if it had never come: the server's weights stay as they are.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pliant.split.payload import Message, Payload, read_labels


@dataclass(frozen=True)
class Manifest:
    """What a client's next message must be."""

    client: int
    shape: tuple[int, ...]  # of its activations, with the batch
    classes: int
    owned: frozenset[int]  # classes that the client has said it has
    payload: Payload
    largest: float  # number that an activation may be


def received(message: object, manifest: Manifest) -> tuple[Tensor, Tensor] | str:
    """Read a message; return activations and labels, or the reason to refuse it, in one line.

    >>> from pliant.split.guard import Manifest, received
    >>> from pliant.split.payload import Message, Payload
    >>> plain = Payload(zeros="sent")
    >>> wanted = Manifest(3, (1, 2), 10, frozenset({7}), plain, largest=1e6)
    >>> received(Message((1, 2), bytes(8), b"\\x07"), wanted)
    (tensor([[0., 0.]]), tensor([7]))
    >>> received(Message((1, 2), bytes(8), b"\\x09"), wanted)
    'client 3: expected labels of its classes, got 9'
    """
    try:
        found = _read(message, manifest)
    except Exception as error:  # whatever a client sends, the server goes on
        found = f"a message that can be read, got {type(error).__name__} in reading it"
    return f"client {manifest.client}: expected {found}" if isinstance(found, str) else found


def _read(message: object, manifest: Manifest) -> tuple[Tensor, Tensor] | str:
    if type(message) is not Message:
        return f"a message, got {type(message).__name__}"
    if message.shape != manifest.shape:
        return f"activations of shape {manifest.shape}, got {str(message.shape)[:60]}"
    try:
        activations = manifest.payload.decode(message.body, manifest.shape)
    except ValueError as error:
        return f"activations in {error}"
    try:
        labels = read_labels(message.labels, manifest.classes)
    except ValueError as error:
        return str(error)
    if len(labels) != manifest.shape[0]:
        return f"{manifest.shape[0]} labels, got {len(labels)}"
    strange = set(labels.tolist()) - manifest.owned
    if strange:
        return f"labels of its classes, got {min(strange)}"
    most = float(activations.abs().max()) if activations.numel() else 0.0
    if not most < float("inf"):
        wild = "NaN" if torch.isnan(activations).any() else "an infinity"
        return f"activations of finite numbers, got {wild}"
    if most > manifest.largest:
        return f"activations up to {manifest.largest:g}, got {most:.6g}"
    return activations, labels
