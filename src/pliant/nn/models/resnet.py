"""Residual networks for 32x32 images: ResNet-20 and ResNet-18, with projection shortcuts.

He, Zhang, Ren, Sun: Deep Residual Learning for Image Recognition, CVPR 2016. The stem is the usual
one for small images: a 3x3 convolution without pooling.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from pliant.nn.models.initialisation import check_positive, init_he_weights


class BasicBlock(nn.Module):
    """Add two 3x3 convolutions to the input, projected if its shape changes."""

    def __init__(self, inputs: int, filters: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, filters, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(filters)
        self.conv2 = nn.Conv2d(filters, filters, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(filters)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != filters:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, filters, 1, stride, bias=False), nn.BatchNorm2d(filters)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return F.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    """Classify images with stages of residual blocks, each twice as wide at half the size."""

    def __init__(self, blocks: tuple[int, ...], width: int, classes: int, channels: int) -> None:
        super().__init__()
        check_positive("resnet", {"width": width, "classes": classes, "channels": channels})
        self.stem = nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
        )
        stages = [_make_stage(width, width, blocks[0], stride=1)]
        for count in blocks[1:]:
            stages.append(_make_stage(width, 2 * width, count, stride=2))
            width *= 2
        self.stages = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(width, classes)
        init_he_weights(self)

    def forward(self, x: Tensor) -> Tensor:  # x: (batch, channel, h, w)
        features = self.stages(self.stem(x))
        logits: Tensor = self.classifier(self.pool(features).flatten(1))
        return logits


def _make_stage(inputs: int, filters: int, count: int, *, stride: int) -> nn.Sequential:
    rest = (BasicBlock(filters, filters, 1) for _ in range(count - 1))
    return nn.Sequential(BasicBlock(inputs, filters, stride), *rest)


def resnet20(classes: int = 10, *, width: int = 16, channels: int = 3) -> ResNet:
    """Build a ResNet-20 whose first stage has ``width`` filters: 40.8 M MACs at 16."""
    return ResNet((3, 3, 3), width, classes, channels)


def resnet18(classes: int = 10, *, width: int = 64, channels: int = 3) -> ResNet:
    """Build a ResNet-18 whose first stage has ``width`` filters: 555 M MACs at 64."""
    return ResNet((2, 2, 2, 2), width, classes, channels)
