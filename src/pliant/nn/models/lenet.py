"""The wide LeNet of AdaSplit: a sequence of five stages that can be cut after any of them.

Chopra et al., AdaSplit: Adaptive Trade-offs for Resource-constrained Distributed Deep Learning,
2021. With a cut after stage s, ``net[:s]`` is the device's part and ``net[s:]`` the server's.
"""

from collections import OrderedDict

from torch import nn

from pliant.nn.models.initial import need_positive


def lenet(
    classes: int = 5,
    *,
    filters: tuple[int, int] = (20, 50),
    hidden: tuple[int, int] = (800, 500),
    channels: int = 3,
    side: int = 32,
) -> nn.Sequential:
    """Build the LeNet of the paper: 1,536,000 MACs in stage 1 and 9,362,500 in the other four."""
    need_positive("lenet", {"classes": classes, "channels": channels, "side": side})
    need_positive("lenet", {"filters[0]": filters[0], "filters[1]": filters[1]})
    need_positive("lenet", {"hidden[0]": hidden[0], "hidden[1]": hidden[1]})
    left = _half(_half(side))
    return nn.Sequential(
        OrderedDict(
            stage1=_convolution(channels, filters[0]),
            stage2=_convolution(filters[0], filters[1]),
            stage3=nn.Sequential(nn.Flatten(), *_hidden(filters[1] * left * left, hidden[0])),
            stage4=nn.Sequential(*_hidden(hidden[0], hidden[1])),
            stage5=nn.Linear(hidden[1], classes),
        )
    )


def lenet_small(classes: int = 5, *, channels: int = 3, side: int = 32) -> nn.Sequential:
    """Build the LeNet with half the filters and half the hidden units."""
    return lenet(classes, filters=(10, 25), hidden=(400, 250), channels=channels, side=side)


def _convolution(inputs: int, filters: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, filters, 5, padding=2),
        nn.ReLU(inplace=True),
        nn.LocalResponseNorm(4, alpha=0.001 / 9, beta=0.75, k=1.0),  # the authors' code
        nn.MaxPool2d(3, stride=2, padding=1),
    )


def _hidden(inputs: int, units: int) -> tuple[nn.Module, nn.Module]:
    return nn.Linear(inputs, units), nn.ReLU(inplace=True)


def _half(side: int) -> int:
    return (side + 1) // 2
