"""Parts that many families share."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


def make_unit(
    inputs: int,
    outputs: int,
    kernel: int = 3,
    stride: int = 1,
    groups: int = 1,
    act: type = nn.ReLU,
) -> nn.Sequential:
    """Make a convolution with batch norm and an activation."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
        act(),
    )


class Classifier(nn.Module):
    """Features, a global mean and a linear layer."""

    def __init__(self, features: nn.Module, width: int) -> None:
        super().__init__()
        self.features, self.head = features, nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.flatten(nn.functional.adaptive_avg_pool2d(self.features(x), 1), 1))


class Residual(nn.Module):
    """`x + body(x)`, then an activation; with a projection if shapes differ."""

    def __init__(
        self,
        body: nn.Module,
        shortcut: nn.Module | None = None,
        act: Callable[[Tensor], Tensor] = torch.relu,
    ) -> None:
        super().__init__()
        self.body, self.shortcut, self._act = body, shortcut, act

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.shortcut is None else self.shortcut(x)
        return self._act(self.body(x) + identity)


class Gate(nn.Module):
    """Squeeze-excite with convolutions."""

    def __init__(self, width: int, hidden: int, act: type = nn.ReLU) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.reduce, self.expand = nn.Conv2d(width, hidden, 1), nn.Conv2d(hidden, width, 1)
        self.act = act()

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.expand(self.act(self.reduce(self.pool(x)))))


class DropPath(nn.Module):
    """Drop a residual branch of some samples."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        keep = 1 - self.rate
        mask = x.new_empty((x.shape[0], *[1] * (x.ndim - 1))).bernoulli_(keep)
        return x * mask / keep
