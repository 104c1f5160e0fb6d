"""Image classifiers in the manner of torchvision, timm and the CIFAR zoos, at tiny widths."""

import torch
import torch.nn.functional as F
from tests.nn.families.parts import Classifier, DropPath, Gate, Residual, make_unit
from torch import Tensor, nn


def make_basic_resnet() -> nn.Module:
    def block(inputs: int, outputs: int, stride: int) -> Residual:
        body = nn.Sequential(
            make_unit(inputs, outputs, 3, stride),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        project = nn.Sequential(
            nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
        )
        return Residual(body, project if stride > 1 else None)

    stem = nn.Sequential(make_unit(3, 4, 7, 2), nn.MaxPool2d(3, 2, 1))
    return Classifier(nn.Sequential(stem, block(4, 4, 1), block(4, 6, 2), block(6, 6, 1)), 6)


def make_bottleneck_resnet() -> nn.Module:
    def block(inputs: int, width: int, groups: int = 1) -> Residual:
        body = nn.Sequential(
            make_unit(inputs, width, 1),
            make_unit(width, width, 3, groups=groups),
            nn.Conv2d(width, 8, 1, bias=False),
            nn.BatchNorm2d(8),
        )
        project = nn.Sequential(nn.Conv2d(inputs, 8, 1), nn.BatchNorm2d(8))
        return Residual(body, project if inputs != 8 else None)

    return Classifier(nn.Sequential(make_unit(3, 4), block(4, 3), block(8, 4), block(8, 4, 2)), 8)


def make_pre_activation_resnet() -> nn.Module:
    class Block(nn.Module):
        def __init__(self, inputs: int, outputs: int, stride: int) -> None:
            super().__init__()
            self.norms = nn.ModuleList([nn.BatchNorm2d(inputs), nn.BatchNorm2d(outputs)])
            self.first = nn.Conv2d(inputs, outputs, 3, stride, 1)
            self.second = nn.Conv2d(outputs, outputs, 3, 1, 1)
            if stride > 1:
                self.shortcut = nn.Conv2d(inputs, outputs, 1, stride)

        def forward(self, x: Tensor) -> Tensor:
            out = F.relu(self.norms[0](x))
            identity = self.shortcut(out) if hasattr(self, "shortcut") else x
            out = self.second(F.dropout(F.relu(self.norms[1](self.first(out))), 0.0))
            out += identity
            return out

    body = nn.Sequential(nn.Conv2d(3, 4, 3, 1, 1), Block(4, 4, 1), Block(4, 6, 2), Block(6, 6, 1))
    return Classifier(nn.Sequential(body, nn.BatchNorm2d(6), nn.ReLU()), 6)


def make_vgg() -> nn.Module:
    layers: list[nn.Module] = []
    inputs = 3
    for width in (4, "pool", 6, 6, "pool", 5):
        if isinstance(width, str):
            layers.append(nn.MaxPool2d(2, 2))
        else:
            conv = nn.Conv2d(inputs, width, 3, padding=1)
            layers += [conv, nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
            inputs = width
    features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten())
    head = [nn.Linear(20, 7), nn.ReLU(True), nn.Dropout(0.0), nn.Linear(7, 6), nn.ReLU(True)]
    return nn.Sequential(features, *head, nn.Linear(6, 3))


def make_alexnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 5, 2, 2),
        nn.ReLU(inplace=True),
        nn.LocalResponseNorm(3, alpha=0.2, k=2.0),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(6, 7, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(7, 4, 3, padding=1),
        nn.AdaptiveAvgPool2d((2, 2)),
        nn.Flatten(),
        nn.Linear(16, 8),
        nn.ReLU(inplace=True),
        nn.Linear(8, 3),
    )


class DenseLayer(nn.Module):
    """A bottleneck layer that takes the list of all earlier features."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(inputs), nn.Conv2d(inputs, 6, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(6), nn.Conv2d(6, 3, 3, padding=1, bias=False)

    def forward(self, features: list[Tensor]) -> Tensor:
        x = self.conv1(F.relu(self.norm1(torch.cat(features, 1))))
        return self.conv2(F.relu(self.norm2(x)))


class DenseBlock(nn.ModuleDict):
    """Dense layers by name."""

    def __init__(self, inputs: int) -> None:
        super().__init__({f"layer{i}": DenseLayer(inputs + 3 * i) for i in range(3)})

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for _, layer in self.items():
            features.append(layer(features))
        return torch.cat(features, 1)


def make_densenet() -> nn.Module:
    transition = nn.Sequential(
        nn.BatchNorm2d(13), nn.ReLU(), nn.Conv2d(13, 5, 1), nn.AvgPool2d(2, stride=2)
    )
    body = nn.Sequential(make_unit(3, 4), DenseBlock(4), transition, DenseBlock(5))
    return Classifier(nn.Sequential(body, nn.BatchNorm2d(14), nn.ReLU(inplace=True)), 14)


class InvertedResidual(nn.Module):
    """MobileNetV2 to EfficientNet: expand, depthwise, an optional gate, project."""

    def __init__(
        self, inputs: int, outputs: int, expand: int, act: type, gate: int = 0, drop: float = 0.0
    ) -> None:
        super().__init__()
        width = inputs * expand
        layers: list[nn.Module] = [make_unit(inputs, width, 1, act=act)] if expand > 1 else []
        layers.append(make_unit(width, width, 3, groups=width, act=act))
        if gate:
            layers.append(Gate(width, gate, act))
        layers += [nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)]
        self.block, self.drop = nn.Sequential(*layers), DropPath(drop)
        self.has_residual = inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        out = self.block(x)
        if self.drop.rate and self.has_residual:
            out = self.drop(out)
        return x + out if self.has_residual else out


def make_inverted(act: type, gate: int = 0, drop: float = 0.0) -> nn.Module:
    blocks = [
        InvertedResidual(4, 4, 1, act, gate),
        InvertedResidual(4, 5, 2, act, gate),
        InvertedResidual(5, 5, 2, act, gate, drop),
    ]
    return Classifier(
        nn.Sequential(make_unit(3, 4, 3, 2, act=act), *blocks, make_unit(5, 8, 1, act=act)), 8
    )


def make_mobilenet_v1() -> nn.Module:
    def separable(inputs: int, outputs: int, stride: int) -> nn.Sequential:
        depthwise = make_unit(inputs, inputs, 3, stride, groups=inputs)
        return nn.Sequential(depthwise, make_unit(inputs, outputs, 1))

    return Classifier(nn.Sequential(make_unit(3, 4), separable(4, 6, 2), separable(6, 7, 1)), 7)


class ShuffleUnit(nn.Module):
    """ShuffleNetV2 with a strided unit of two branches."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        if stride > 1:
            self.left = nn.Sequential(
                nn.Conv2d(inputs, inputs, 3, stride, 1, groups=inputs),
                nn.BatchNorm2d(inputs),
                make_unit(inputs, width, 1),
            )
        first = inputs if stride > 1 else width
        self.right = nn.Sequential(
            make_unit(first, width, 1),
            nn.Conv2d(width, width, 3, stride, 1, groups=width),
            nn.BatchNorm2d(width),
            make_unit(width, width, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.stride == 1:
            kept, x = x.chunk(2, dim=1)
            out = torch.cat((kept, self.right(x)), dim=1)
        else:
            out = torch.cat((self.left(x), self.right(x)), dim=1)
        batch, channels, height, width = out.size()
        out = out.view(batch, 2, channels // 2, height, width).transpose(1, 2).contiguous()
        return out.view(batch, channels, height, width)


def make_shufflenet() -> nn.Module:
    body = nn.Sequential(make_unit(3, 4), ShuffleUnit(4, 4, 2), ShuffleUnit(8, 4, 1))
    return Classifier(nn.Sequential(body, make_unit(8, 6, 1)), 6)


class Factorised(nn.Module):
    """InceptionV3's block of factorised kernels, whose branches are concatenated."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.direct = nn.Conv2d(inputs, 3, 1)
        self.first = nn.Conv2d(inputs, 3, 1)
        self.rows = nn.Conv2d(3, 3, (1, 5), padding=(0, 2))
        self.columns = nn.Conv2d(3, 4, (5, 1), padding=(2, 0))
        self.pooled = nn.Conv2d(inputs, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        branch = F.relu(self.first(x))
        branches = [
            self.direct(x),
            self.rows(branch),
            self.columns(branch),
            self.pooled(F.avg_pool2d(x, 3, 1, 1)),
        ]
        return F.relu(torch.cat(branches, 1))


class GoogLeNet(nn.Module):
    """Inception blocks with an auxiliary classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = make_unit(3, 4), nn.ModuleList([Factorised(4), Factorised(12)])
        self.auxiliary = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Conv2d(12, 4, 1), nn.Flatten())
        self.auxiliary_head, self.head = nn.Linear(16, 3), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.blocks[0](self.stem(x))
        early = self.auxiliary_head(torch.tanh(self.auxiliary(x)))
        return self.head(self.blocks[1](x).mean((2, 3))), early


class Fire(nn.Module):
    """SqueezeNet's block."""

    def __init__(self, inputs: int, squeezed: int, width: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(inputs, squeezed, 1)
        self.small = nn.Conv2d(squeezed, width, 1)
        self.large = nn.Conv2d(squeezed, width, 3, padding=1)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.squeeze(x))
        return torch.cat([self.act(self.small(x)), self.act(self.large(x))], 1)


def make_squeezenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 5, 3, 2),
        nn.ReLU(),
        nn.MaxPool2d(2, ceil_mode=True),
        Fire(5, 3, 4),
        Fire(8, 4, 4),
        nn.Conv2d(8, 3, 1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d((1, 1)),
        nn.Flatten(),
    )


def make_resnext(width: int = 8, groups: int = 2) -> nn.Module:
    def block(inputs: int, outputs: int, stride: int) -> Residual:
        body = nn.Sequential(
            make_unit(inputs, width, 1),
            make_unit(width, width, 3, stride, groups=groups),
            nn.Conv2d(width, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        project = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))
        return Residual(body, project if inputs != outputs else None)

    return Classifier(nn.Sequential(make_unit(3, 4), block(4, 6, 2), block(6, 6, 1)), 6)


def make_grouped_stack() -> nn.Module:
    """Make grouped convolutions in a row, of which one reads two groups of different layers."""
    return Classifier(
        nn.Sequential(
            make_unit(3, 8),
            make_unit(8, 12, 3, groups=4),
            make_unit(12, 8, 3, groups=2),
            nn.Conv2d(8, 2, 1, groups=2),
            make_unit(2, 6, 1, groups=2),
        ),
        6,
    )


def make_regnet() -> nn.Module:
    def block(inputs: int, outputs: int, stride: int) -> Residual:
        body = nn.Sequential(
            make_unit(inputs, outputs, 1),
            make_unit(outputs, outputs, 3, stride, groups=2),
            Gate(outputs, 3),
            nn.Conv2d(outputs, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        project = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))
        return Residual(body, project if inputs != outputs else None)

    return Classifier(nn.Sequential(make_unit(3, 4), block(4, 6, 2), block(6, 6, 1)), 6)


class ConvNeXtBlock(nn.Module):
    """Depthwise convolution, layer norm over the last axis, two linear layers, a layer scale."""

    def __init__(self, width: int, drop: float) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(width, 9), nn.GELU(), nn.Linear(9, width))
        self.scale, self.drop = nn.Parameter(torch.full((width, 1, 1), 0.1)), DropPath(drop)

    def forward(self, x: Tensor) -> Tensor:
        out = self.mlp(self.norm(self.depthwise(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        out = self.scale * out
        return x + (self.drop(out) if self.drop.rate else out)


def make_convnext(drop: float = 0.0) -> nn.Module:
    blocks = [nn.Conv2d(3, 4, 2, 2), ConvNeXtBlock(4, 0.0), nn.Conv2d(4, 6, 2, 2)]
    return Classifier(nn.Sequential(*blocks, ConvNeXtBlock(6, drop)), 6)
