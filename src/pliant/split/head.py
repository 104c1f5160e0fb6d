"""The device's module: its part of the network, the projection head, and a tap on what is sent."""

import copy

import torch
from torch import Tensor, nn

from pliant import rng

HIDDEN, EMBEDDING = (128, 256), 64  # of maps and of plain features; Chopra et al., AdaSplit


class Tapped(nn.Module):
    """A device's part with a head on it; gives the embedding and the activation that is sent."""

    def __init__(self, device: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.device = device
        self.head = head

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        activation = self.device(x)
        # an operation that elastic networks do not know is given all channels, absent ones as
        # zeros: so the filters behind the tap can be dropped though their channels are sent
        return self.head(activation), torch.positive(activation)


def projection(shape: tuple[int, ...]) -> nn.Module:
    """Make the projection head for activations of this shape."""
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


def redrawn(net: nn.Module, seed: int, *address: str | int) -> nn.Module:
    """Return a copy whose weights are drawn anew, by torch's own rule for each layer."""
    fresh = copy.deepcopy(net)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rng.number(seed, *address))
        for module in fresh.modules():
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
    return fresh
