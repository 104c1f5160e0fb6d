"""DenseNet-BC for 32x32 images, at any depth.

Huang, Liu, van der Maaten, Weinberger: Densely Connected Convolutional Networks, CVPR 2017.
Bottlenecks have four times the growth; transitions halve the channels.
"""

import torch
from torch import Tensor, nn

from pliant.nn.models.initialisation import PooledClassifier, check_positive


class Bottleneck(nn.Module):
    """Append ``growth`` new channels to the input."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, 4 * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(4 * growth)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        new = self.conv1(self.relu(self.norm1(x)))
        new = self.conv2(self.relu(self.norm2(new)))
        return torch.cat((x, new), 1)


def _make_transition(inputs: int, filters: int) -> nn.Sequential:
    return nn.Sequential(
        nn.BatchNorm2d(inputs),
        nn.ReLU(inplace=True),
        nn.Conv2d(inputs, filters, 1, bias=False),
        nn.AvgPool2d(2),
    )


def densenet_bc(
    depth: int = 40, classes: int = 10, *, growth: int = 12, channels: int = 3
) -> PooledClassifier:
    """Build a DenseNet-BC with ``(depth - 4) // 6`` bottlenecks per block.

    Depths are 6n + 4. Like the code that most papers use, this also accepts 6n + 1 and builds three
    layers fewer: the "DenseNet-19" of DISTREAL has 16 layers.
    """
    if depth < 10 or (depth - 4) % 3 != 0:
        raise ValueError(
            f"densenet: expected `depth` of at least 10, 4 more than a multiple of 3, got {depth}"
        )
    check_positive("densenet", {"growth": growth, "classes": classes, "channels": channels})
    count, width = (depth - 4) // 6, 2 * growth
    layers: list[nn.Module] = [nn.Conv2d(channels, width, 3, padding=1, bias=False)]
    for block in range(3):
        if block > 0:
            layers.append(_make_transition(width, width // 2))
            width //= 2
        bottlenecks = [Bottleneck(width + i * growth, growth) for i in range(count)]
        layers.append(nn.Sequential(*bottlenecks))
        width += count * growth
    layers += [nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    return PooledClassifier(layers, width, classes)


def densenet19(classes: int = 10, *, growth: int = 12, channels: int = 3) -> PooledClassifier:
    """Build DISTREAL's small network for CIFAR-10: 15 convolutions, 19.9 M MACs."""
    return densenet_bc(19, classes, growth=growth, channels=channels)


def densenet40(classes: int = 10, *, growth: int = 12, channels: int = 3) -> PooledClassifier:
    """Build DISTREAL's network for CIFAR-10: 39 convolutions, 72.4 M MACs."""
    return densenet_bc(40, classes, growth=growth, channels=channels)


def densenet100(classes: int = 100, *, growth: int = 12, channels: int = 3) -> PooledClassifier:
    """Build DISTREAL's network for CIFAR-100: 99 convolutions, 288 M MACs."""
    return densenet_bc(100, classes, growth=growth, channels=channels)
