"""The networks of these experiments: bundled ones with other numbers of filters."""

from torch import nn

from pliant.nn.models import cifar_cnn, exit_cnn


def digits_exits(classes: int, channels: int) -> nn.Module:
    """Build a network with three exits for the digits: 0.51 M MACs."""
    return exit_cnn(classes, filters=(8, 16, 32), channels=channels)


def heterofl_c(classes: int, channels: int) -> nn.Module:
    """Build the network of HeteroFL's level c for MNIST: 2.6 M MACs.

    Its convolutions have no bias, which the batch norm behind them would cancel.
    """
    return cifar_cnn(classes, filters=(16, 32, 64, 128), channels=channels)
