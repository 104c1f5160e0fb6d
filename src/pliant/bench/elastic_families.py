"""Networks of families beyond plain convolutions, with limits of their MACs at rate .5."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pliant.nn.elastic import Elastic
from pliant.nn.models import vit_small


@dataclass(frozen=True)
class Family:
    """A network, the shape of its inputs, and limits relative to the full network at rate .5."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    macs_limit: float
    time_limit: float = 0.6


class GroupedBlock(nn.Module):
    """A residual block whose 3x3 convolution has groups, and maybe a squeeze-excite gate."""

    def __init__(self, inputs: int, outputs: int, groups: int, stride: int, gate: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_make_unit(inputs, outputs, 1), *_make_unit(outputs, outputs, 3, stride, groups)
        )
        self.gate: nn.Module | None = None
        if gate:
            layers = (nn.Conv2d(outputs, gate, 1), nn.ReLU(), nn.Conv2d(gate, outputs, 1))
            self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), *layers, nn.Sigmoid())
        last = nn.Conv2d(outputs, outputs, 1, bias=False)
        self.last = nn.Sequential(last, nn.BatchNorm2d(outputs))
        shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        self.shortcut = nn.Sequential(shortcut, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        if self.gate is not None:
            y = y * self.gate(y)
        return F.relu(self.last(y) + self.shortcut(x))


def _make_unit(
    inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1
) -> tuple[nn.Module, ...]:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return conv, nn.BatchNorm2d(outputs), nn.ReLU()


def make_grouped_net(groups: int, gate: int = 0) -> nn.Sequential:
    """Make a small ResNeXt or, with gates, a small RegNet."""
    layers: list[nn.Module] = [*_make_unit(3, 32, 3)]
    inputs = 32
    for width, stride in ((64, 1), (128, 2), (256, 2)):
        layers.append(GroupedBlock(inputs, width, groups, stride, gate))
        layers.append(GroupedBlock(width, width, groups, 1, gate))
        inputs = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))


def make_autoencoder() -> nn.Sequential:
    """Make an encoder and a decoder of transposed convolutions."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 32), (32, 64), (64, 128)):
        layers += _make_unit(inputs, outputs, 3, 2)
    for inputs, outputs in ((128, 64), (64, 32), (32, 32)):
        conv = nn.ConvTranspose2d(inputs, outputs, 4, 2, 1, bias=False)
        layers += [conv, nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(32, 3, 3, padding=1))


def make_generator() -> nn.Sequential:
    """Make the generator of a DCGAN (Radford et al., ICLR 2016) for 32x32 images."""
    layers: list[nn.Module] = []
    for inputs, outputs, stride, padding in ((64, 256, 1, 0), (256, 128, 2, 1), (128, 64, 2, 1)):
        conv = nn.ConvTranspose2d(inputs, outputs, 4, stride, padding, bias=False)
        layers += [conv, nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.ConvTranspose2d(64, 3, 4, 2, 1), nn.Tanh())


class ShuffleUnit(nn.Module):
    """A unit of ShuffleNetV2 (Ma et al., ECCV 2018, figure 3), whose shuffle is a reshape."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        width = outputs // 2
        self.left: nn.Module | None = None
        if stride > 1:
            self.left = nn.Sequential(
                *_make_depthwise(inputs, stride), *_make_unit(inputs, width, 1)
            )
        self.right = nn.Sequential(
            *_make_unit(inputs if stride > 1 else width, width, 1),
            *_make_depthwise(width, stride),
            *_make_unit(width, width, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.left is None:
            passed, used = x.chunk(2, dim=1)
            x = torch.cat((passed, self.right(used)), dim=1)
        else:
            x = torch.cat((self.left(x), self.right(x)), dim=1)
        batch, channels, height, width = x.size()
        x = x.view(batch, 2, channels // 2, height, width).transpose(1, 2)
        out: Tensor = x.contiguous().view(batch, channels, height, width)
        return out


def _make_depthwise(width: int, stride: int) -> tuple[nn.Module, ...]:
    conv = nn.Conv2d(width, width, 3, stride, 1, groups=width, bias=False)
    return conv, nn.BatchNorm2d(width)


def make_shufflenet() -> nn.Sequential:
    """Make a small ShuffleNetV2."""
    layers: list[nn.Module] = [*_make_unit(3, 24, 3)]
    inputs = 24
    for width in (116, 232, 464):
        layers += [ShuffleUnit(inputs, width, 2), ShuffleUnit(width, width, 1)]
        layers.append(ShuffleUnit(width, width, 1))
        inputs = width
    layers += [*_make_unit(464, 512, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(512, 10))


class ChannelNorm(nn.Module):
    """Layer norm over the channels of images, written out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(1, keepdim=True)
        variance = (x - mean).pow(2).mean(1, keepdim=True)
        x = (x - mean) / torch.sqrt(variance + 1e-6)
        out: Tensor = self.weight[:, None, None] * x + self.bias[:, None, None]
        return out


class ConvNeXtBlock(nn.Module):
    """A block of ConvNeXt (Liu et al., CVPR 2022, figure 4) with stochastic depth."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.scale = nn.Parameter(torch.full((width,), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.scale * self.mlp(self.norm(self.depthwise(x).permute(0, 2, 3, 1)))
        keep = x.new_empty((x.shape[0], 1, 1, 1)).bernoulli_(0.9) / 0.9
        out: Tensor = x + y.permute(0, 3, 1, 2) * keep
        return out


def make_convnext() -> nn.Sequential:
    """Make a small ConvNeXt."""
    layers: list[nn.Module] = [nn.Conv2d(3, 48, 2, 2), ChannelNorm(48)]
    for width in (48, 96, 192):
        layers += [ConvNeXtBlock(width), ConvNeXtBlock(width)]
        if width < 192:
            layers += [ChannelNorm(width), nn.Conv2d(width, 2 * width, 2, 2)]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(192)]
    return nn.Sequential(*layers, nn.Linear(192, 10))


FAMILIES: Mapping[str, Family] = {
    "ResNeXt": Family(lambda: make_grouped_net(8), (3, 32, 32), 0.30),
    "RegNet": Family(lambda: make_grouped_net(4, gate=16), (3, 32, 32), 0.30),
    "ShuffleNetV2": Family(make_shufflenet, (3, 32, 32), 0.32),
    "ConvNeXt": Family(make_convnext, (3, 32, 32), 0.33),
    "transposed autoencoder": Family(make_autoencoder, (3, 32, 32), 0.40),
    "DCGAN generator": Family(make_generator, (64, 1, 1), 0.40),
    "vit_small": Family(vit_small, (3, 32, 32), 0.35, 0.7),
}
INNER_LIMIT = 0.55  # of a vision transformer that keeps its residual width


def measure_macs(net: Elastic, *, keeps_width: bool = False) -> float:
    """Return the MACs at rate .5 relative to all; `keeps_width` keeps the first site whole."""
    rates = [0.5] * len(net.sites)
    if keeps_width:
        rates[0] = 0.0
    return net.macs(rates) / net.macs(0.0)
