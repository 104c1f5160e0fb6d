"""Validate clients' messages before the server trains on them; a rejected one has no effect."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pliant.split.payload import Message, Payload, decode_labels


@dataclass(frozen=True)
class MessageManifest:
    """What a client's next message must look like."""

    client: int
    shape: tuple[int, ...]  # of the activations, including the batch axis
    classes: int
    client_classes: frozenset[int]
    payload: Payload
    max_abs: float  # bound on activations


def decode_message(message: object, manifest: MessageManifest) -> tuple[Tensor, Tensor] | str:
    """Return a message's activations and labels, or the reason to reject it in one line.

    >>> from pliant.split.validation import MessageManifest, decode_message
    >>> from pliant.split.payload import Message, Payload
    >>> dense = Payload(zeros="sent")
    >>> manifest = MessageManifest(3, (1, 2), 10, frozenset({7}), dense, max_abs=1e6)
    >>> decode_message(Message((1, 2), bytes(8), b"\\x07"), manifest)
    (tensor([[0., 0.]]), tensor([7]))
    >>> decode_message(Message((1, 2), bytes(8), b"\\x09"), manifest)
    'client 3: expected labels of its classes, got 9'
    """
    try:
        result = _try_decode(message, manifest)
    except Exception as error:  # no message may stop the server
        result = f"a readable message, got {type(error).__name__} while reading it"
    return f"client {manifest.client}: expected {result}" if isinstance(result, str) else result


def _try_decode(message: object, manifest: MessageManifest) -> tuple[Tensor, Tensor] | str:
    if type(message) is not Message:
        return f"a message, got {type(message).__name__}"
    if message.shape != manifest.shape:
        return f"activations of shape {manifest.shape}, got {str(message.shape)[:60]}"
    try:
        activations = manifest.payload.decode(message.body, manifest.shape)
    except ValueError as error:
        return f"activations in {error}"
    try:
        labels = decode_labels(message.labels, manifest.classes)
    except ValueError as error:
        return str(error)
    if len(labels) != manifest.shape[0]:
        return f"{manifest.shape[0]} labels, got {len(labels)}"
    unknown = set(labels.tolist()) - manifest.client_classes
    if unknown:
        return f"labels of its classes, got {min(unknown)}"
    maximum = float(activations.abs().max()) if activations.numel() else 0.0
    if not maximum < float("inf"):
        kind = "NaN" if torch.isnan(activations).any() else "an infinity"
        return f"activations of finite numbers, got {kind}"
    if maximum > manifest.max_abs:
        return f"activations up to {manifest.max_abs:g}, got {maximum:.6g}"
    return activations, labels
