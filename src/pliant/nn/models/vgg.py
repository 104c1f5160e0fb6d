"""VGG-11 with batch norm and a single linear layer, for 32x32 images.

Simonyan, Zisserman: Very Deep Convolutional Networks for Large-Scale Image Recognition, ICLR 2015.
"""

from torch import Tensor, nn

from pliant.nn.models.initialisation import check_positive, init_he_weights

_STAGES = ((1,), (2,), (4, 4), (8, 8), (8, 8))  # filters of each convolution, relative to the first


class VGG(nn.Module):
    """Classify images with stages of 3x3 convolutions, each followed by pooling."""

    def __init__(self, classes: int, width: int, channels: int) -> None:
        super().__init__()
        check_positive("vgg", {"classes": classes, "width": width, "channels": channels})
        layers: list[nn.Module] = []
        inputs = channels
        for stage in _STAGES:
            for factor in stage:
                filters = factor * width
                layers += [
                    nn.Conv2d(inputs, filters, 3, padding=1, bias=False),
                    nn.BatchNorm2d(filters),
                    nn.ReLU(inplace=True),
                ]
                inputs = filters
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(inputs, classes)
        init_he_weights(self)

    def forward(self, x: Tensor) -> Tensor:  # x: (batch, channel, h, w), h and w at least 32
        logits: Tensor = self.classifier(self.pool(self.features(x)).flatten(1))
        return logits


def vgg11(classes: int = 10, *, width: int = 64, channels: int = 3) -> VGG:
    """Build a VGG-11 whose first convolution has ``width`` filters: 153 M MACs at 64."""
    return VGG(classes, width, channels)
