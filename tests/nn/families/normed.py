"""Networks that compute their weights, norm layers that are written out, and channel shuffles.

Those with `is_plain` have the same parameters and say the same in operations of torch, for the
oracle.
"""

import warnings
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from tests.nn.families.parts import Classifier, Residual, make_unit
from torch import Tensor, nn
from torch.nn.utils import parametrizations

Normalise = Callable[[nn.Module], nn.Module]


@torch.fx.wrap
def stochastic_depth(x: Tensor, p: float, mode: str, training: bool = True) -> Tensor:
    """Drop a branch of some samples, as torchvision's function of this name does."""
    if not training or p == 0.0:
        return x
    size = [x.shape[0]] + [1] * (x.ndim - 1) if mode == "row" else [1] * x.ndim
    noise = torch.empty(size, dtype=x.dtype, device=x.device).bernoulli_(1 - p).div_(1 - p)
    return x * noise


class ChannelNorm(nn.Module):
    """Layer norm over the channels of images, written out as in ConvNeXt."""

    def __init__(self, width: int, *, is_plain: bool) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self._is_plain = is_plain

    def forward(self, x: Tensor) -> Tensor:
        if self._is_plain:
            last = x.permute(0, 2, 3, 1)
            last = F.layer_norm(last, last.shape[-1:], self.weight, self.bias, 1e-6)
            return last.permute(0, 3, 1, 2)
        mean = x.mean(1, keepdim=True)
        variance = (x - mean).pow(2).mean(1, keepdim=True)
        x = (x - mean) / torch.sqrt(variance + 1e-6)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class RootNorm(ChannelNorm):
    """The same with a variance, an inverse root and views of the parameters."""

    def forward(self, x: Tensor) -> Tensor:
        if self._is_plain:
            return super().forward(x)
        variance = x.var(1, keepdim=True, unbiased=False)
        x = torch.rsqrt(variance + 1e-6) * (x - x.mean([1], True))
        return x * self.weight.view(1, -1, 1, 1) + self.bias.reshape(-1, 1, 1)


class ConvNeXtBlock(nn.Module):
    """A depthwise convolution, a norm, two 1x1 convolutions, a layer scale and stochastic depth."""

    def __init__(self, width: int, norm: nn.Module) -> None:
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(width, width, 5, padding=2, groups=width), norm
        self.expand, self.reduce = nn.Conv2d(width, 9, 1), nn.Conv2d(9, width, 1)
        self.scale = nn.Parameter(torch.full((width, 1, 1), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        out = self.reduce(F.gelu(self.expand(self.norm(self.depthwise(x)))))
        return x + stochastic_depth(self.scale * out, 0.4, "row", self.training)


def make_convnext(norm: type[ChannelNorm], *, is_plain: bool = False) -> nn.Module:
    make = partial(norm, is_plain=is_plain)
    stem = nn.Sequential(nn.Conv2d(3, 4, 2, 2), make(4), ConvNeXtBlock(4, make(4)))
    down = nn.Sequential(make(4), nn.Conv2d(4, 6, 2, 2), ConvNeXtBlock(6, make(6)))
    return Classifier(nn.Sequential(stem, down), 6)


def shuffle_like_torchvision(x: Tensor, groups: int) -> Tensor:
    batch, channels, height, width = x.size()
    x = x.view(batch, groups, channels // groups, height, width)
    return torch.transpose(x, 1, 2).contiguous().view(batch, channels, height, width)


def shuffle_by_permuting(x: Tensor, groups: int) -> Tensor:
    batch, channels, *size = x.shape
    x = x.reshape(batch, groups, channels // groups, *size).permute(0, 2, 1, 3, 4)
    return x.flatten(1, 2)


class ShuffleUnit(nn.Module):
    """ShuffleNetV2: half of the channels pass by, and all are shuffled."""

    def __init__(self, width: int, shuffle: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            make_unit(width, width, 1),
            nn.Conv2d(width, width, 3, 1, 1, groups=width, bias=False),
            nn.BatchNorm2d(width),
            make_unit(width, width, 1),
        )
        self._shuffle = shuffle

    def forward(self, x: Tensor) -> Tensor:
        passed, used = x.chunk(2, dim=1)
        return self._shuffle(torch.cat((passed, self.branch(used)), dim=1), 2)


def make_shufflenet(shuffle: Callable[[Tensor, int], Tensor]) -> nn.Module:
    units = [ShuffleUnit(5, shuffle) for _ in range(3)]
    return Classifier(nn.Sequential(make_unit(3, 10), *units, make_unit(10, 6, 1)), 6)


def make_grouped_shuffle() -> nn.Module:
    """Make a ShuffleNetV1: grouped 1x1 convolutions with a shuffle between them."""
    body = nn.Sequential(
        make_unit(6, 18, 1, groups=3),
        nn.ChannelShuffle(3),
        nn.Conv2d(18, 18, 3, 1, 1, groups=18),
        nn.BatchNorm2d(18),
        nn.Conv2d(18, 6, 1, groups=3),
        nn.BatchNorm2d(6),
    )
    return Classifier(nn.Sequential(make_unit(3, 6), Residual(body)), 6)


def norm_by_hook(name: str) -> Normalise:
    """Return one of torch's older tools, without the warning that it is old."""

    def normalise(layer: nn.Module) -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return getattr(nn.utils, name)(layer)

    return normalise


def make_normed(normalise: Normalise) -> nn.Module:
    """Make a discriminator whose layers all have a normed weight."""
    stem = nn.Sequential(normalise(nn.Conv2d(3, 5, 3, padding=1)), nn.LeakyReLU(0.2))
    body = nn.Sequential(normalise(nn.Conv2d(5, 6, 4, 2, 1)), nn.LeakyReLU(0.2))
    wide = nn.Sequential(normalise(nn.Conv2d(6, 6, 3, 1, 1, groups=2)), nn.Tanh())
    net = Classifier(nn.Sequential(stem, body, wide), 6)
    net.head = normalise(net.head)
    return net


def make_normed_signal() -> nn.Module:
    """Make a decoder with weight norm along its inputs, and a residual of weight-normed layers."""
    weight_norm = parametrizations.weight_norm
    body = nn.Sequential(nn.ELU(), weight_norm(nn.Conv1d(6, 6, 3, padding=2, dilation=2)), nn.ELU())
    return nn.Sequential(
        weight_norm(nn.Conv1d(2, 6, 5, padding=2)),
        Residual(body, act=torch.tanh),
        weight_norm(nn.ConvTranspose1d(6, 5, 4, 2, 1)),
        nn.ELU(),
        nn.Conv1d(5, 2, 3, padding=1),
    )


class StandardisedConv(nn.Conv2d):
    """A convolution whose weights have mean 0 and variance 1 in every filter, and a gain."""

    def __init__(self, inputs: int, outputs: int, kernel: int, groups: int = 1) -> None:
        super().__init__(inputs, outputs, kernel, padding=kernel // 2, groups=groups)
        self.gain = nn.Parameter(torch.ones(outputs, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        flat = self.weight.view(self.weight.size(0), -1)
        mean, deviation = flat.mean(1), flat.std(1) + 1e-5
        weight = (self.weight - mean.view(-1, 1, 1, 1)) / deviation.view(-1, 1, 1, 1)
        weight = weight * self.gain
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, groups=self.groups)


class BatchStandardisedConv(nn.Conv2d):
    """The same by batch norm of the weights, as in timm."""

    def forward(self, x: Tensor) -> Tensor:
        flat = self.weight.reshape(1, self.out_channels, -1)
        weight = F.batch_norm(flat, None, None, training=True, momentum=0.0, eps=1e-6)
        return F.conv2d(x, weight.reshape_as(self.weight), self.bias, self.stride, self.padding)


def make_standardised() -> nn.Module:
    """Make a pre-activation residual network with group norm, as in Big Transfer."""
    body = nn.Sequential(
        nn.GroupNorm(2, 6),
        nn.ReLU(),
        StandardisedConv(6, 4, 1),
        nn.ReLU(),
        StandardisedConv(4, 6, 3),
    )
    depthwise = StandardisedConv(6, 6, 3, groups=6)
    stem = BatchStandardisedConv(3, 6, 3, padding=1)
    return Classifier(nn.Sequential(stem, Residual(body, act=lambda x: x), depthwise, nn.ReLU()), 6)


class Siamese(nn.Module):
    """One tower of convolutions, applied to two values with different channels."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(3, 5, 3, padding=1), nn.Conv2d(3, 5, 1)
        self.shared, self.last = nn.Conv2d(5, 6, 3, padding=1), nn.Conv2d(12, 4, 1)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        left, right = F.relu(self.left(x)), torch.tanh(self.right(x))
        both = torch.cat([F.relu(self.shared(left)), F.elu(self.shared(right))], 1)
        return self.head(self.last(both).mean((2, 3)))


class SharedHead(nn.Module):
    """RetinaNet: one head for the levels of a pyramid, with 1x1 convolutions between them."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([make_unit(3, 5), make_unit(5, 6, stride=2)])
        self.lateral = nn.ModuleList([nn.Conv2d(5, 4, 1), nn.Conv2d(6, 4, 1)])
        self.head = nn.Sequential(nn.Conv2d(4, 5, 3, padding=1), nn.ReLU(), nn.Conv2d(5, 2, 1))

    def forward(self, x: Tensor) -> list[Tensor]:
        outputs = []
        for stage, lateral in zip(self.stages, self.lateral, strict=True):
            x = stage(x)
            outputs.append(self.head(lateral(x)))
        return outputs


def make_style() -> nn.Module:
    """Make a style network with instance norm that tracks its statistics."""
    norm = partial(nn.InstanceNorm2d, affine=True, track_running_stats=True)
    stem = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), norm(5), nn.ReLU())
    body = nn.Sequential(nn.Conv2d(5, 5, 3, padding=1), norm(5), nn.ReLU())
    return nn.Sequential(stem, Residual(body), nn.Conv2d(5, 3, 3, padding=1))


def make_synchronised() -> nn.Module:
    net = Classifier(nn.Sequential(make_unit(3, 5), Residual(make_unit(5, 5))), 5)
    return nn.SyncBatchNorm.convert_sync_batchnorm(net)


class TextRecurrent(nn.Module):
    """Embeddings, a recurrent layer of two levels, and a linear layer."""

    def __init__(self, cell: type[nn.RNNBase]) -> None:
        super().__init__()
        self.tokens, self.cell = nn.Embedding(20, 6), cell(6, 5, 2)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        steps, _ = self.cell(self.tokens(x).transpose(0, 1))
        return self.head(steps[-1])


class SpeechRecurrent(nn.Module):
    """DeepSpeech: convolutions over time, then a bidirectional GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.Sequential(nn.Conv1d(2, 6, 3, 2), nn.BatchNorm1d(6), nn.ReLU())
        self.cell = nn.GRU(6, 4, batch_first=True, bidirectional=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(self.convs(x).transpose(1, 2))[0])
