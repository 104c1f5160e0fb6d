"""MobileNetV2 for 32x32 images: inverted residuals with depthwise convolutions.

Sandler, Howard, Zhu, Zhmoginov, Chen: MobileNetV2: Inverted Residuals and Linear Bottlenecks, CVPR
2018. As usual for small images, the first two strides are 1. The activation is a plain ReLU.
"""

from torch import Tensor, nn

from pliant.nn.models.initialisation import PooledClassifier, check_positive

# expansion, filters, blocks, first stride: table 2, but with stride 1 for 24 filters
_STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 1),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


class InvertedResidual(nn.Module):
    """Expand, convolve depthwise and project, with a shortcut if shapes agree."""

    def __init__(self, inputs: int, filters: int, expansion: int, stride: int) -> None:
        super().__init__()
        inner = inputs * expansion
        self.has_shortcut = stride == 1 and inputs == filters
        self.layers = nn.Sequential(
            *(_make_convolution(inputs, inner, 1) if expansion != 1 else ()),
            *_make_convolution(inner, inner, 3, stride=stride, groups=inner),
            nn.Conv2d(inner, filters, 1, bias=False),
            nn.BatchNorm2d(filters),
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return x + y if self.has_shortcut else y


def _make_convolution(
    inputs: int, filters: int, kernel: int, *, stride: int = 1, groups: int = 1
) -> tuple[nn.Module, nn.Module, nn.Module]:
    conv = nn.Conv2d(inputs, filters, kernel, stride, kernel // 2, groups=groups, bias=False)
    return conv, nn.BatchNorm2d(filters), nn.ReLU(inplace=True)


def _round_to_eight(filters: float) -> int:
    rounded = max(8, int(filters + 4) // 8 * 8)
    # rounding down must not lose more than a tenth
    return rounded if rounded >= 0.9 * filters else rounded + 8


def mobilenet_v2(classes: int = 10, *, width: float = 1.0, channels: int = 3) -> PooledClassifier:
    """Build a MobileNetV2 with ``width`` times the filters of the paper."""
    check_positive("mobilenet_v2", {"classes": classes, "width": width, "channels": channels})
    filters = _round_to_eight(32 * width)
    layers: list[nn.Module] = [*_make_convolution(channels, filters, 3)]
    for expansion, base, blocks, stride in _STAGES:
        inputs, filters = filters, _round_to_eight(base * width)
        layers.append(InvertedResidual(inputs, filters, expansion, stride))
        layers += [InvertedResidual(filters, filters, expansion, 1) for _ in range(blocks - 1)]
    last = _round_to_eight(1280 * max(1.0, width))  # never narrowed, as in the paper
    layers += _make_convolution(filters, last, 1)
    return PooledClassifier(layers, last, classes)
