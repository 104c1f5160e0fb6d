"""The wide LeNet of AdaSplit: five stages, with a possible cut after each.

Chopra et al., AdaSplit: Adaptive Trade-offs for Resource-constrained Distributed Deep Learning,
2021. Cut after stage s, the device runs ``net[:s]`` and the server ``net[s:]``.
"""

from collections import OrderedDict

from torch import nn

from pliant.nn.models.initialisation import check_positive


def lenet(
    classes: int = 5,
    *,
    filters: tuple[int, int] = (20, 50),
    hidden: tuple[int, int] = (800, 500),
    channels: int = 3,
    side: int = 32,
) -> nn.Sequential:
    """Build the paper's LeNet: 1,536,000 MACs in stage 1 and 9,362,500 in the other four."""
    check_positive("lenet", {"classes": classes, "channels": channels, "side": side})
    check_positive("lenet", {"filters[0]": filters[0], "filters[1]": filters[1]})
    check_positive("lenet", {"hidden[0]": hidden[0], "hidden[1]": hidden[1]})
    final_side = -(-side // 4)  # halved twice, rounded up
    return nn.Sequential(
        OrderedDict(
            stage1=_make_convolution(channels, filters[0]),
            stage2=_make_convolution(filters[0], filters[1]),
            stage3=nn.Sequential(
                nn.Flatten(),
                nn.Linear(filters[1] * final_side * final_side, hidden[0]),
                nn.ReLU(inplace=True),
            ),
            stage4=nn.Sequential(nn.Linear(hidden[0], hidden[1]), nn.ReLU(inplace=True)),
            stage5=nn.Linear(hidden[1], classes),
        )
    )


def lenet_small(classes: int = 5, *, channels: int = 3, side: int = 32) -> nn.Sequential:
    """Build the LeNet with half the filters and hidden units."""
    return lenet(classes, filters=(10, 25), hidden=(400, 250), channels=channels, side=side)


def _make_convolution(inputs: int, filters: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, filters, 5, padding=2),
        nn.ReLU(inplace=True),
        nn.LocalResponseNorm(4, alpha=0.001 / 9, beta=0.75, k=1.0),  # as in the authors' code
        nn.MaxPool2d(3, stride=2, padding=1),
    )
