"""Small convolutional networks, for 28x28 characters and for 32x32 images.

The FEMNIST network has the kernels and filters of Caldas et al., LEAF: A Benchmark for Federated
Settings, 2018. It has no padding and 256 hidden units, to match the 4.0 M MACs of Rapp et al.,
DISTREAL: Distributed Resource-Aware Learning in Heterogeneous Systems, AAAI 2022.
"""

from itertools import pairwise

from torch import Tensor, nn

from pliant.nn.exits import ExitNetwork
from pliant.nn.models.initialisation import PooledClassifier, check_positive

Pair = tuple[int, int]


class ConvNet(nn.Module):
    """Classify small images with two 5x5 convolutions, each pooled, and one hidden layer."""

    def __init__(
        self, classes: int, filters: Pair, hidden: int, *, channels: int, side: int, norm: bool
    ) -> None:
        super().__init__()
        final_side = ((side - 4) // 2 - 4) // 2
        check_positive("cnn", {"classes": classes, "hidden": hidden, "channels": channels})
        check_positive("cnn", {"filters[0]": filters[0], "filters[1]": filters[1]})
        if final_side < 1:
            raise ValueError(f"cnn: expected images with `side` of 16 or more, got {side}")
        self.features = nn.Sequential(
            *_make_convolution(channels, filters[0], norm=norm),
            *_make_convolution(filters[0], filters[1], norm=norm),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(filters[1] * final_side * final_side, hidden),
            nn.ReLU(inplace=True),
            nn.Linear(hidden, classes),
        )

    def forward(self, x: Tensor) -> Tensor:  # x: (batch, channel, side, side)
        logits: Tensor = self.classifier(self.features(x))
        return logits


def _make_convolution(inputs: int, filters: int, *, norm: bool) -> list[nn.Module]:
    conv = nn.Conv2d(inputs, filters, 5, bias=not norm)
    norms = [nn.BatchNorm2d(filters)] if norm else []
    return [conv, *norms, nn.ReLU(inplace=True), nn.MaxPool2d(2)]


def femnist_cnn(
    classes: int = 62,
    *,
    filters: Pair = (32, 64),
    hidden: int = 256,
    channels: int = 1,
    side: int = 28,
) -> ConvNet:
    """Build the FEMNIST network: 4,015,616 MACs for 62 classes."""
    return ConvNet(classes, filters, hidden, channels=channels, side=side, norm=False)


def femnist_cnn_small(classes: int = 62, *, channels: int = 1, side: int = 28) -> ConvNet:
    """Build the FEMNIST network with 17 and 34 filters, at a third of the MACs."""
    return femnist_cnn(classes, filters=(17, 34), channels=channels, side=side)


def digits_cnn(
    classes: int = 10,
    *,
    filters: Pair = (12, 24),
    hidden: int = 128,
    channels: int = 1,
    side: int = 28,
) -> ConvNet:
    """Build a network for the bundled digits: 0.68 M MACs."""
    return ConvNet(classes, filters, hidden, channels=channels, side=side, norm=False)


def digits_cnn_bn(
    classes: int = 10,
    *,
    filters: Pair = (12, 24),
    hidden: int = 128,
    channels: int = 1,
    side: int = 28,
) -> ConvNet:
    """Build the digits network with batch norm after each convolution."""
    return ConvNet(classes, filters, hidden, channels=channels, side=side, norm=True)


def cifar_cnn(
    classes: int = 10, *, filters: tuple[int, ...] = (32, 64, 64, 128), channels: int = 3
) -> PooledClassifier:
    """Build four 3x3 convolutions with batch norm for 32x32 images: 9.1 M MACs.

    All but the last are pooled, so images are at least 8x8. Weights are those of PyTorch's layers.
    """
    check_positive("cifar_cnn", {"classes": classes, "channels": channels})
    check_positive("cifar_cnn", {f"filters[{index}]": count for index, count in enumerate(filters)})
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise((channels, *filters)):
        conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        layers += [conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    return PooledClassifier(layers[:-1], filters[-1], classes, he_weights=False)


def exit_cnn(
    classes: int = 10, *, filters: tuple[int, ...] = (32, 64, 64, 128), channels: int = 3
) -> ExitNetwork:
    """Build `cifar_cnn` with an exit after each convolution."""
    check_positive("exit_cnn", {"classes": classes, "channels": channels})
    check_positive("exit_cnn", {f"filters[{index}]": count for index, count in enumerate(filters)})
    stages: list[nn.Module] = []
    for inputs, outputs in pairwise((channels, *filters)):
        pool = [nn.MaxPool2d(2)] if stages else []
        conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        stages.append(nn.Sequential(*pool, conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)))
    exits = [
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(count, classes))
        for count in filters
    ]
    return ExitNetwork(stages, exits)
