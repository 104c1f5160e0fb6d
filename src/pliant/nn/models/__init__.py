"""Bundled networks: plain torch modules, each built by a function.

>>> import pliant as pl
>>> net = pl.models.resnet20(classes=10)
>>> sum(tensor.numel() for tensor in net.parameters())
272474
"""

from collections.abc import Callable, Mapping

from torch import nn

from pliant.nn.models.cnn import digits_cnn as digits_cnn
from pliant.nn.models.cnn import digits_cnn_bn as digits_cnn_bn
from pliant.nn.models.cnn import femnist_cnn as femnist_cnn
from pliant.nn.models.cnn import femnist_cnn_small as femnist_cnn_small
from pliant.nn.models.densenet import densenet19 as densenet19
from pliant.nn.models.densenet import densenet40 as densenet40
from pliant.nn.models.densenet import densenet100 as densenet100
from pliant.nn.models.densenet import densenet_bc as densenet_bc
from pliant.nn.models.lenet import lenet as lenet
from pliant.nn.models.lenet import lenet_small as lenet_small
from pliant.nn.models.mobilenet import mobilenet_v2 as mobilenet_v2
from pliant.nn.models.resnet import resnet18 as resnet18
from pliant.nn.models.resnet import resnet20 as resnet20
from pliant.nn.models.vgg import vgg11 as vgg11

_FUNCTIONS: tuple[Callable[..., nn.Module], ...] = (
    digits_cnn, digits_cnn_bn, femnist_cnn, femnist_cnn_small, lenet, lenet_small, densenet_bc,
    densenet19, densenet40, densenet100, resnet20, resnet18, mobilenet_v2, vgg11,
)  # fmt: skip
# every function takes the keywords `classes` and `channels`
MODELS: Mapping[str, Callable[..., nn.Module]] = {f.__name__: f for f in _FUNCTIONS}
# channels, height and width of the images that each network takes by default
INPUT_SHAPES: Mapping[str, tuple[int, int, int]] = {
    name: (1, 28, 28) if name.startswith(("digits", "femnist")) else (3, 32, 32) for name in MODELS
}
