"""A convolutional network for signals of several channels, such as accelerometer windows."""

from itertools import pairwise

from torch import Tensor, nn

from pliant.nn.models.initialisation import check_positive


class SignalNet(nn.Module):
    """Classify signals by convolutions along time, averaged over all steps."""

    def __init__(self, classes: int, filters: tuple[int, ...], channels: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise((channels, *filters)):
            conv = nn.Conv1d(inputs, outputs, 5, padding=2, bias=False)
            layers += [conv, nn.BatchNorm1d(outputs), nn.ReLU(inplace=True), nn.MaxPool1d(2)]
        self.features = nn.Sequential(*layers[:-1])
        self.pool = nn.AdaptiveAvgPool1d(1)
        self.classifier = nn.Linear(filters[-1], classes)

    def forward(self, x: Tensor) -> Tensor:  # x: (batch, channel, time)
        logits: Tensor = self.classifier(self.pool(self.features(x)).flatten(1))
        return logits


def signal_cnn(
    classes: int = 10, *, filters: tuple[int, ...] = (32, 64, 64), channels: int = 3
) -> SignalNet:
    """Build convolutions along time with batch norm; all but the last are pooled."""
    check_positive("signal_cnn", {"classes": classes, "channels": channels})
    check_positive("signal_cnn", {f"filters[{i}]": count for i, count in enumerate(filters)})
    return SignalNet(classes, filters, channels)
