"""Image classifiers with branches, stages and gates, in the manner of timm and the CIFAR zoos."""

import torch
import torch.nn.functional as F
from tests.nn.families.parts import Classifier, Gate, Residual, make_unit
from torch import Tensor, nn


class RepVGGBlock(nn.Module):
    """The sum of a 3x3 convolution, a 1x1 convolution and the identity, each with batch norm."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.large = nn.Sequential(nn.Conv2d(inputs, outputs, 3, 1, 1), nn.BatchNorm2d(outputs))
        self.small = nn.Sequential(nn.Conv2d(inputs, outputs, 1), nn.BatchNorm2d(outputs))
        self.identity = nn.BatchNorm2d(inputs) if inputs == outputs else None

    def forward(self, x: Tensor) -> Tensor:
        out = self.large(x) + self.small(x)
        return F.relu(out if self.identity is None else out + self.identity(x))


def make_repvgg() -> nn.Module:
    return Classifier(nn.Sequential(RepVGGBlock(3, 5), RepVGGBlock(5, 5), RepVGGBlock(5, 6)), 6)


class GhostModule(nn.Module):
    """A narrow convolution whose outputs are doubled by cheap depthwise ones."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        half = outputs // 2
        self.primary, self.cheap = make_unit(inputs, half, 1), make_unit(half, half, groups=half)

    def forward(self, x: Tensor) -> Tensor:
        first = self.primary(x)
        return torch.cat([first, self.cheap(first)], dim=1)


def make_ghostnet() -> nn.Module:
    block = Residual(nn.Sequential(GhostModule(6, 8), Gate(8, 3), GhostModule(8, 6)))
    return Classifier(nn.Sequential(make_unit(3, 6), block, GhostModule(6, 8)), 8)


def make_convmixer() -> nn.Module:
    depthwise = nn.Sequential(
        nn.Conv2d(6, 6, 5, groups=6, padding="same"), nn.GELU(), nn.BatchNorm2d(6)
    )
    pointwise = nn.Sequential(nn.Conv2d(6, 6, 1), nn.GELU(), nn.BatchNorm2d(6))
    stem = nn.Sequential(nn.Conv2d(3, 6, 2, 2), nn.GELU(), nn.BatchNorm2d(6))
    return Classifier(nn.Sequential(stem, Residual(depthwise, act=lambda x: x), pointwise), 6)


class PoolFormerBlock(nn.Module):
    """Average pooling as a token mixer, group norm over all channels, an MLP of convolutions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(1, width), nn.GroupNorm(1, width)])
        self.pool = nn.AvgPool2d(3, 1, 1, count_include_pad=False)
        self.mlp = nn.Sequential(nn.Conv2d(width, 8, 1), nn.GELU(), nn.Conv2d(8, width, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        x = x + (self.pool(y) - y)
        return x + self.mlp(self.norms[1](x))


def make_poolformer() -> nn.Module:
    return Classifier(nn.Sequential(nn.Conv2d(3, 6, 4, 4), PoolFormerBlock(6)), 6)


class CrossStage(nn.Module):
    """CSPNet: one half of the channels passes by the blocks of a stage."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.expand = make_unit(width, 8, 1)
        self.body = Residual(nn.Sequential(make_unit(4, 4, 1), make_unit(4, 4)))
        self.mix, self.join = make_unit(4, 4, 1), make_unit(8, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        passed, used = torch.split(self.expand(x), 4, dim=1)
        return self.join(torch.cat([self.mix(self.body(used)), passed], dim=1))


def make_cspnet() -> nn.Module:
    return Classifier(nn.Sequential(make_unit(3, 5, act=nn.LeakyReLU), CrossStage(5)), 5)


class Res2Block(nn.Module):
    """Parts of the channels are convolved in turn, each with the result of the one before."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.reduce = make_unit(width, 9, 1)
        self.convs = nn.ModuleList([make_unit(3, 3), make_unit(3, 3)])
        self.expand = nn.Sequential(nn.Conv2d(9, width, 1), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = torch.chunk(self.reduce(x), 3, 1)
        second = self.convs[0](second)
        third = self.convs[1](third + second)
        return F.relu(x + self.expand(torch.cat([first, second, third], 1)))


def make_res2net() -> nn.Module:
    return Classifier(nn.Sequential(make_unit(3, 6), Res2Block(6)), 6)


class HighResolution(nn.Module):
    """HRNet: two resolutions side by side that exchange their features."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = make_unit(3, 4)
        self.fine, self.coarse = make_unit(4, 4), make_unit(4, 6, 3, 2)
        self.up = nn.Sequential(nn.Conv2d(6, 4, 1), nn.BatchNorm2d(4))
        self.down = nn.Sequential(nn.Conv2d(4, 6, 3, 2, 1), nn.BatchNorm2d(6))
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        fine, coarse = self.fine(x), self.coarse(x)
        raised = F.interpolate(self.up(coarse), scale_factor=2, mode="nearest")
        fine, coarse = F.relu(fine + raised), F.relu(coarse + self.down(fine))
        large = F.interpolate(coarse, size=fine.shape[2:], mode="bilinear", align_corners=False)
        return self.head(torch.cat([fine, large], 1).mean((2, 3)))


class DualPath(nn.Module):
    """DPN: the first channels are added, the others concatenated."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.body = nn.Sequential(make_unit(inputs, 5, 1), make_unit(5, 6), nn.Conv2d(6, 7, 1))
        self.norm, self.shortcut = nn.BatchNorm2d(7), nn.Conv2d(inputs, 7, 1)

    def forward(self, x: Tensor) -> Tensor:
        x, out = self.shortcut(x), self.norm(self.body(x))
        joined = torch.cat([x[:, :4, :, :] + out[:, :4, :, :], x[:, 4:], out[:, 4:]], 1)
        return F.relu(joined)


def make_dual_path() -> nn.Module:
    return Classifier(nn.Sequential(make_unit(3, 5), DualPath(5), DualPath(10)), 10)


class Aggregation(nn.Module):
    """DLA: a root convolution over the outputs of a tree of blocks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.left = Residual(nn.Sequential(make_unit(width, width), make_unit(width, width)))
        self.right = Residual(make_unit(width, width))
        self.root = make_unit(2 * width, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        left = self.left(x)
        return self.root(torch.cat([left, self.right(left)], 1))


def make_layer_aggregation() -> nn.Module:
    return Classifier(nn.Sequential(make_unit(3, 5), Aggregation(5)), 6)


class Pyramid(nn.Module):
    """PyramidNet: widths that grow, with shortcuts padded by zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, 1, 1)
        widths = ((4, 5), (5, 7))
        self.norms = nn.ModuleList(nn.BatchNorm2d(inputs) for inputs, _ in widths)
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, 1, 1) for a, b in widths)
        self.head = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for norm, conv in zip(self.norms, self.convs, strict=True):
            out = conv(F.relu(norm(x)))
            batch, channels, height, width = x.shape
            zeros = torch.zeros(
                batch, out.shape[1] - channels, height, width, dtype=x.dtype, device=x.device
            )
            x = out + torch.cat((x, zeros), 1)
        return self.head(F.relu(x).mean((2, 3)))


class Attentive(nn.Module):
    """CBAM: a gate from the mean and the maximum, then a spatial gate."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = make_unit(width, width)
        self.mlp = nn.Sequential(nn.Conv2d(width, 3, 1), nn.ReLU(), nn.Conv2d(3, width, 1))
        self.spatial = nn.Conv2d(2, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        mean, peak = F.adaptive_avg_pool2d(y, 1), F.adaptive_max_pool2d(y, 1)
        y = y * torch.sigmoid(self.mlp(mean) + self.mlp(peak))
        maps = torch.cat([y.mean(1, keepdim=True), y.amax(1, keepdim=True)], 1)
        return x + y * torch.sigmoid(self.spatial(maps))


def make_attentive() -> nn.Module:
    return Classifier(nn.Sequential(make_unit(3, 5), Attentive(5)), 5)


class Selective(nn.Module):
    """SKNet: two kernels, weighted by a softmax over the branches."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.small, self.large = make_unit(width, width, 3), make_unit(width, width, 5)
        self.reduce = nn.Linear(width, 3)
        self.gates = nn.ModuleList([nn.Linear(3, width), nn.Linear(3, width)])

    def forward(self, x: Tensor) -> Tensor:
        small, large = self.small(x), self.large(x)
        code = F.relu(self.reduce((small + large).mean((2, 3))))
        weights = torch.stack([gate(code) for gate in self.gates], 1).softmax(1)
        return small * weights[:, 0, :, None, None] + large * weights[:, 1, :, None, None]


def make_selective() -> nn.Module:
    return Classifier(nn.Sequential(make_unit(3, 5), Selective(5), make_unit(5, 6)), 6)


def make_maxout() -> nn.Module:
    class Maxout(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(4, 5, 3)

        def forward(self, x: Tensor) -> Tensor:
            first, second = self.conv(x).chunk(2, 1)
            return self.last(torch.maximum(first, second))

    return Classifier(Maxout(), 5)
