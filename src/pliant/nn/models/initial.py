"""What the bundled networks share before their first step: checked sizes and He's initial weights.

He, Zhang, Ren, Sun: Delving Deep into Rectifiers, ICCV 2015.
"""

from collections.abc import Mapping
from math import prod, sqrt

from torch import nn


def need_positive(network: str, sizes: Mapping[str, float]) -> None:
    """Refuse a size that is not above zero."""
    for name, size in sizes.items():
        if not size > 0:
            raise ValueError(f"{network}: expected `{name}` above 0, got {size}")


def draw_he_weights(net: nn.Module) -> None:
    """Draw every convolution's weights anew, so that gradients keep their size on the way back."""
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            # each input of a grouped convolution has fewer outputs; torch's own He forgets that
            fan_out = module.out_channels * prod(module.kernel_size) // module.groups
            nn.init.normal_(module.weight, std=sqrt(2 / fan_out))
