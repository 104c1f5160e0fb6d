"""Two convolutions and two linear layers for 28x28 characters: for FEMNIST and for the digits.

The FEMNIST network has the kernels and filters of Caldas et al., LEAF: A Benchmark for Federated
Settings, 2018, without padding and with 256 hidden units: the 4.0 M MACs of Rapp et al., DISTREAL:
Distributed Resource-Aware Learning in Heterogeneous Systems, AAAI 2022.
"""

from torch import Tensor, nn

from pliant.nn.models.initial import need_positive


class ConvNet(nn.Module):
    """Classify small images by two rounds of 5x5 convolution and pooling, and one hidden layer."""

    def __init__(
        self,
        classes: int,
        filters: tuple[int, int],
        hidden: int,
        *,
        channels: int,
        side: int,
        normalised: bool,
    ) -> None:
        super().__init__()
        left = ((side - 4) // 2 - 4) // 2
        need_positive("cnn", {"classes": classes, "hidden": hidden, "channels": channels})
        need_positive("cnn", {"filters[0]": filters[0], "filters[1]": filters[1]})
        if left < 1:
            raise ValueError(f"cnn: expected images with `side` of 16 or more, got {side}")
        self.features = nn.Sequential(
            *_convolution(channels, filters[0], normalised=normalised),
            *_convolution(filters[0], filters[1], normalised=normalised),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(filters[1] * left * left, hidden),
            nn.ReLU(inplace=True),
            nn.Linear(hidden, classes),
        )

    def forward(self, x: Tensor) -> Tensor:  # x: (batch, channel, side, side)
        logits: Tensor = self.classifier(self.features(x))
        return logits


def _convolution(inputs: int, filters: int, *, normalised: bool) -> list[nn.Module]:
    conv = nn.Conv2d(inputs, filters, 5, bias=not normalised)
    norm = [nn.BatchNorm2d(filters)] if normalised else []
    return [conv, *norm, nn.ReLU(inplace=True), nn.MaxPool2d(2)]


def femnist_cnn(
    classes: int = 62,
    *,
    filters: tuple[int, int] = (32, 64),
    hidden: int = 256,
    channels: int = 1,
    side: int = 28,
) -> ConvNet:
    """Build the FEMNIST network: 4,015,616 MACs for 62 classes."""
    return ConvNet(classes, filters, hidden, channels=channels, side=side, normalised=False)


def femnist_cnn_small(classes: int = 62, *, channels: int = 1, side: int = 28) -> ConvNet:
    """Build the FEMNIST network with 17 and 34 filters: a third of the MACs."""
    return femnist_cnn(classes, filters=(17, 34), channels=channels, side=side)


def digits_cnn(
    classes: int = 10,
    *,
    filters: tuple[int, int] = (12, 24),
    hidden: int = 128,
    channels: int = 1,
    side: int = 28,
) -> ConvNet:
    """Build a network for the embedded digits: 0.68 M MACs."""
    return ConvNet(classes, filters, hidden, channels=channels, side=side, normalised=False)


def digits_cnn_bn(
    classes: int = 10,
    *,
    filters: tuple[int, int] = (12, 24),
    hidden: int = 128,
    channels: int = 1,
    side: int = 28,
) -> ConvNet:
    """Build the network for the digits with batch norm after each convolution."""
    return ConvNet(classes, filters, hidden, channels=channels, side=side, normalised=True)
