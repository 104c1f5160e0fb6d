"""Bundled networks: plain torch modules, each built by a function.

>>> import pliant as pl
>>> net = pl.models.resnet20(classes=10)
>>> sum(tensor.numel() for tensor in net.parameters())
272474
"""

from collections.abc import Callable, Mapping

from torch import nn

from pliant.nn.models.cnn import (
    cifar_cnn,
    digits_cnn,
    digits_cnn_bn,
    exit_cnn,
    femnist_cnn,
    femnist_cnn_small,
)
from pliant.nn.models.densenet import densenet19, densenet40, densenet100, densenet_bc
from pliant.nn.models.lenet import lenet, lenet_small
from pliant.nn.models.mobilenet import mobilenet_v2
from pliant.nn.models.resnet import resnet18, resnet20
from pliant.nn.models.signal import signal_cnn
from pliant.nn.models.transformer import text_transformer, vit_small
from pliant.nn.models.vgg import vgg11

__all__ = [  # noqa: RUF022 - in the order in which they are listed to users
    "digits_cnn", "digits_cnn_bn", "femnist_cnn", "femnist_cnn_small", "lenet", "lenet_small",
    "cifar_cnn", "exit_cnn", "densenet_bc", "densenet19", "densenet40", "densenet100", "resnet20",
    "resnet18", "mobilenet_v2", "vgg11", "vit_small", "text_transformer", "signal_cnn",
]  # fmt: skip
# of signals (channel, time) and of token sequences
SEQUENCE_MODELS: Mapping[str, Callable[..., nn.Module]] = {
    "text_transformer": text_transformer, "signal_cnn": signal_cnn
}  # fmt: skip
# of images; every function takes the keywords `classes` and `channels`
MODELS: Mapping[str, Callable[..., nn.Module]] = {
    name: globals()[name] for name in __all__ if name not in SEQUENCE_MODELS
}
# channels, height and width of the images that each network takes by default
INPUT_SHAPES: Mapping[str, tuple[int, int, int]] = {
    name: (1, 28, 28) if name.startswith(("digits", "femnist")) else (3, 32, 32) for name in MODELS
}
# of one sample that each network of sequences takes by default
SEQUENCE_SHAPES: Mapping[str, tuple[int, ...]] = {"text_transformer": (64,), "signal_cnn": (3, 128)}
TOKEN_MODELS = frozenset({"text_transformer"})
