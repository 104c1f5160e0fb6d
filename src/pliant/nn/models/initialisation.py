"""Size checks and He initialisation for the bundled networks.

He, Zhang, Ren, Sun: Delving Deep into Rectifiers, ICCV 2015.
"""

from collections.abc import Mapping
from math import prod, sqrt

from torch import nn


def check_positive(network: str, sizes: Mapping[str, float]) -> None:
    """Raise if a size is not above zero."""
    for name, size in sizes.items():
        if not size > 0:
            raise ValueError(f"{network}: expected `{name}` above 0, got {size}")


def init_he_weights(net: nn.Module) -> None:
    """Initialise all convolutions so that gradients keep their scale in the backward pass."""
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            # nn.init.kaiming_normal_ ignores groups in fan_out
            fan_out = module.out_channels * prod(module.kernel_size) // module.groups
            nn.init.normal_(module.weight, std=sqrt(2 / fan_out))
