"""VGG-11 with batch norm and a single linear layer, for 32x32 images.

Simonyan, Zisserman: Very Deep Convolutional Networks for Large-Scale Image Recognition, ICLR 2015.
"""

from torch import nn

from pliant.nn.models.initialisation import PooledClassifier, check_positive

_STAGES = ((1,), (2,), (4, 4), (8, 8), (8, 8))  # filters of each convolution, relative to the first


def vgg11(classes: int = 10, *, width: int = 64, channels: int = 3) -> PooledClassifier:
    """Build a VGG-11 whose first convolution has ``width`` filters: 153 M MACs at 64.

    Images are at least 32x32.
    """
    check_positive("vgg", {"classes": classes, "width": width, "channels": channels})
    layers: list[nn.Module] = []
    inputs = channels
    for stage in _STAGES:
        for factor in stage:
            conv = nn.Conv2d(inputs, factor * width, 3, padding=1, bias=False)
            inputs = factor * width
            layers += [conv, nn.BatchNorm2d(inputs), nn.ReLU(inplace=True)]
        layers.append(nn.MaxPool2d(2))
    return PooledClassifier(layers, inputs, classes)
