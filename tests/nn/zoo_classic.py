"""Common architectures: residual, dense, branching, separable, gated, grouped."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def make_block(inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> nn.Sequential:
    """Make a convolution with batch norm and ReLU."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class Plain(nn.Module):
    """LeNet-like, with hidden linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 5, 3), nn.Tanh()
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(20, 6), nn.ReLU(), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


class ProjectedResidual(nn.Module):
    """A basic block with a strided 1x1 shortcut, then one with an identity shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = make_block(3, 4)
        self.body = nn.Sequential(
            make_block(4, 6, stride=2), nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6)
        )
        self.shortcut = nn.Sequential(nn.Conv2d(4, 6, 1, 2), nn.BatchNorm2d(6))
        self.second = nn.Sequential(
            make_block(6, 5), nn.Conv2d(5, 6, 3, padding=1), nn.BatchNorm2d(6)
        )
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = F.relu(self.body(x) + self.shortcut(x))
        x = torch.relu(x + self.second(x))
        return self.head(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


class PreActivation(nn.Module):
    """Two pre-activation blocks; the trunk is never normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 5, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(5) for _ in range(3))
        self.convs = nn.ModuleList(nn.Conv2d(5, 5, 3, padding=1) for _ in range(2))
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for norm, conv in zip(self.norms, self.convs, strict=False):
            x = x + conv(F.silu(norm(x)))
        return self.head(F.relu(self.norms[2](x)).mean(dim=(2, 3)))


class IdentityResidual(nn.Module):
    """`x + conv(x)`, also on the network's input."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 3, 3, padding=1)
        self.widen = nn.Conv2d(3, 6, 3, padding=1)
        self.second = nn.Conv2d(6, 6, 3, padding=1)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        x = self.widen(x)
        x = x + self.second(x)
        return self.head(torch.tanh(x).mean((-2, -1)))


class Dense(nn.Module):
    """DenseNet: each layer reads all previous ones, with a transition in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) for n in (4, 7, 5, 8))
        self.layers = nn.ModuleList(nn.Conv2d(n, 3, 3, padding=1) for n in (4, 5))
        self.transition = nn.Conv2d(7, 5, 1)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = torch.cat([x, self.layers[0](F.relu(self.norms[0](x)))], 1)
        x = F.avg_pool2d(self.transition(F.relu(self.norms[1](x))), 2)
        x = torch.cat((x, self.layers[1](F.relu(self.norms[2](x)))), dim=1)
        x = F.relu(self.norms[3](x))
        return self.head(F.avg_pool2d(x, x.size()[2:]).view(x.size(0), -1))


class Inception(nn.Module):
    """Two concatenations of branches with several kernels and a pool."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.ModuleList(
                [
                    make_block(n, 2, 1),
                    make_block(n, 3, 3),
                    nn.Sequential(make_block(n, 2, 1), make_block(2, 3, 5)),
                ]
            )
            for n in (3, 11)
        )
        self.head = nn.Linear(19 * 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        for branches in self.branches:
            pooled = F.max_pool2d(x, 3, stride=1, padding=1)
            x = torch.cat([*(branch(x) for branch in branches), pooled], dim=1)
        return self.head(F.adaptive_max_pool2d(x, 2).flatten(1))


class DepthwiseSeparable(nn.Module):
    """MobileNetV2's inverted residual, with biases in the depthwise convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = make_block(3, 4)
        self.body = nn.Sequential(
            nn.Conv2d(4, 8, 1),
            nn.BatchNorm2d(8),
            nn.ReLU6(inplace=True),
            nn.Conv2d(8, 8, 3, padding=1, groups=8),
            nn.BatchNorm2d(8),
            nn.Hardswish(),
            nn.Conv2d(8, 4, 1),
            nn.BatchNorm2d(4),
        )
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(x + self.body(x))


class DepthwiseMultiplier(nn.Module):
    """Depthwise convolutions with two outputs per channel, also on the network's input."""

    def __init__(self) -> None:
        super().__init__()
        self.spread = nn.Conv2d(3, 6, 3, padding=1, groups=3)
        self.conv = nn.Conv2d(6, 4, 3, padding=1)
        self.depthwise = nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=4)
        self.norm = nn.BatchNorm2d(8)
        self.pointwise = nn.Conv2d(8, 5, 1)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu(self.conv(self.spread(x)), 0.1)
        x = F.elu(self.pointwise(self.norm(self.depthwise(x))))
        return self.head(x.mean([2, 3]))


class SqueezeExcite(nn.Module):
    """A channel gate of 1x1 convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = make_block(3, 6)
        self.squeeze = nn.Conv2d(6, 3, 1)
        self.excite = nn.Conv2d(3, 6, 1)
        self.conv = nn.Conv2d(6, 4, 3)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        gate = F.relu(self.squeeze(x.mean((2, 3), keepdim=True)))
        x = x * torch.sigmoid(self.excite(gate))
        return self.head(self.conv(x).amax((2, 3)))


class LinearSqueezeExcite(nn.Module):
    """A channel gate of linear layers and views, on a residual branch."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = make_block(3, 6)
        self.conv = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.gate = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 6), nn.Sigmoid())
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.conv(x)
        batch, channels, _, _ = y.size()
        gate = self.gate(self.pool(y).view(batch, channels)).view(batch, channels, 1, 1)
        x = F.relu(x + y * gate.expand_as(y))
        return self.head(self.pool(x).flatten(1))


class Grouped(nn.Module):
    """ResNeXt: a grouped convolution inside a bottleneck."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = make_block(3, 4)
        self.reduce = make_block(4, 6, 1)
        self.grouped = nn.Sequential(
            nn.Conv2d(6, 6, 3, padding=1, groups=2), nn.BatchNorm2d(6), nn.ReLU()
        )
        self.expand = nn.Sequential(nn.Conv2d(6, 4, 1), nn.BatchNorm2d(4))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = F.relu(x + self.expand(self.grouped(self.reduce(x))))
        return self.head(x.mean((2, 3)))


class ChannelShuffle(nn.Module):
    """ShuffleNetV2: transform half of the channels, then shuffle all."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = make_block(3, 8)
        self.branch = nn.Sequential(
            make_block(4, 4, 1),
            nn.Conv2d(4, 4, 3, padding=1, groups=4),
            nn.BatchNorm2d(4),
            make_block(4, 4, 1),
        )
        self.last = make_block(8, 5, 1)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        half = int(x.size(1) * 0.5)
        x = torch.cat((x[:, :half], self.branch(x[:, half:, :, :])), 1)
        batch, channels, height, width = x.size()
        x = x.view(batch, 2, channels // 2, height, width)
        x = torch.transpose(x, 1, 2).contiguous().view(batch, channels, height, width)
        return self.head(self.last(x).mean([2, 3]))


class ConvNext(nn.Module):
    """A residual of depthwise convolution, layer norm, two linear layers and a learned scale."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 2, stride=2)
        self.depthwise = nn.Conv2d(6, 6, 3, padding=1, groups=6)
        self.norm = nn.LayerNorm(6)
        self.expand = nn.Linear(6, 9)
        self.reduce = nn.Linear(9, 6)
        self.scale = nn.Parameter(torch.full((6,), 0.5))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.scale * self.reduce(F.gelu(self.expand(y)))
        x = x + y.permute(0, 3, 1, 2)
        return self.head(x.mean((-2, -1)))


class Signal(nn.Module):
    """A 1-d network with batch norm over sequences and over features."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.Conv1d(2, 4, 5), nn.BatchNorm1d(4), nn.ReLU(), nn.MaxPool1d(2)
        )
        self.second = nn.Sequential(
            nn.Conv1d(4, 5, 3, dilation=2), nn.BatchNorm1d(5), nn.Softplus()
        )
        self.hidden = nn.Sequential(nn.Linear(10, 6), nn.BatchNorm1d(6), nn.ReLU())
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.adaptive_avg_pool1d(self.second(self.first(x)), 2)
        return self.head(self.hidden(x.reshape(x.shape[0], -1)))


class Volume(nn.Module):
    """A 3-d network with upsampling and a skip connection, like a small U-Net."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv3d(2, 4, 3, padding=1), nn.BatchNorm3d(4), nn.CELU())
        self.deep = nn.Sequential(nn.AvgPool3d(2), nn.Conv3d(4, 5, 3, padding=1), nn.ReLU())
        self.up = nn.Upsample(scale_factor=2)
        self.join = nn.Conv3d(9, 4, 1)
        self.out = nn.Conv3d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(x)
        return self.out(F.mish(self.join(torch.cat([x, self.up(self.deep(x))], 1))))
