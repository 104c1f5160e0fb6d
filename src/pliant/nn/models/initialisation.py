"""Shared by the bundled networks: checks of options, He initialisation, and a pooled classifier.

He, Zhang, Ren, Sun: Delving Deep into Rectifiers, ICCV 2015.
"""

from collections.abc import Callable, Mapping
from math import prod, sqrt
from typing import get_type_hints

import msgspec
from torch import Tensor, nn

from pliant.value import Numbers, decode


def check_positive(network: str, sizes: Mapping[str, float]) -> None:
    """Raise if a size is not above zero."""
    for name, size in sizes.items():
        if not size > 0:
            raise ValueError(f"{network}: expected `{name}` above 0, got {size}")


def check_types(make: Callable[..., nn.Module], options: Mapping[str, Numbers]) -> None:
    """Raise if an option of a bundled network is not of the type in the signature.

    >>> from pliant.nn.models import digits_cnn
    >>> check_types(digits_cnn, {"filters": (6, 7.5)})
    Traceback (most recent call last):
    ValueError: Expected `int` at `filters.1`, got 7.5
    """
    types = get_type_hints(make)
    decode(dict(options), msgspec.defstruct("Options", [(key, types[key]) for key in options]))


def init_he_weights(net: nn.Module) -> None:
    """Initialise all convolutions so that gradients keep their scale in the backward pass."""
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            # nn.init.kaiming_normal_ ignores groups in fan_out
            fan_out = module.out_channels * prod(module.kernel_size) // module.groups
            nn.init.normal_(module.weight, std=sqrt(2 / fan_out))


class PooledClassifier(nn.Module):
    """Classify images by their features, averaged over all pixels."""

    def __init__(
        self, features: list[nn.Module], width: int, classes: int, *, he_weights: bool = True
    ) -> None:
        super().__init__()
        self.features = nn.Sequential(*features)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(width, classes)
        if he_weights:
            init_he_weights(self)

    def forward(self, x: Tensor) -> Tensor:  # x: (batch, channel, h, w)
        logits: Tensor = self.classifier(self.pool(self.features(x)).flatten(1))
        return logits
