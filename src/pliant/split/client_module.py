"""A client's module: its part of the network and the projection head of its local loss."""

import copy

import torch
from torch import Tensor, nn

from pliant import rng

HIDDEN, EMBEDDING = (128, 256), 64  # for feature maps and flat features; Chopra et al., AdaSplit


class ClientModule(nn.Module):
    """A device's part with a head; returns the embedding and the activation to send."""

    def __init__(self, device: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.device = device
        self.head = head

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        activation = self.device(x)
        # Elastic networks pass all channels, with zeros for dropped ones, to operations they do
        # not know. So this no-op lets filters be dropped although all channels are sent.
        return self.head(activation), torch.positive(activation)


def make_projection_head(shape: tuple[int, ...]) -> nn.Module:
    """Make a projection head for activations of this shape."""
    if len(shape) == 3:
        return nn.Sequential(
            nn.Conv2d(shape[0], HIDDEN[0], 1),
            nn.LeakyReLU(),
            nn.AdaptiveMaxPool2d(1),
            nn.Flatten(),
            nn.Linear(HIDDEN[0], EMBEDDING),
        )
    features = torch.Size(shape).numel()
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(features, HIDDEN[1]),
        nn.LeakyReLU(),
        nn.Linear(HIDDEN[1], EMBEDDING),
    )


def reinitialise(net: nn.Module, seed: int, *address: str | int) -> nn.Module:
    """Return a copy with new random weights, by torch's default for each layer."""
    new = copy.deepcopy(net)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rng.derive_seed(seed, *address))
        for module in new.modules():
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
    return new
