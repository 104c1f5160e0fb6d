"""The memory format of images depends on the mini-batch and the network."""

from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from pliant.nn.compiler.program import BoundProgram, Env
from pliant.nn.elastic import elastic
from pliant.params import get_params


def test_images_are_stored_channels_last_from_as_many_activations_as_weights() -> None:
    net = nn.Sequential(nn.Conv2d(2, 32, 3), nn.Conv2d(32, 18, 3)).double()
    images = torch.randn(7, 2, 7, 7, dtype=torch.float64)
    elastic_net = elastic(net, images[:2])
    weights, activations = 9 * (2 * 32 + 32 * 18), 32 * 25 + 18 * 9  # 5.99 to one
    assert elastic_net.program.min_channels_last_batch == weights / activations
    for batch in (2, 5, 6, 7):
        out = elastic_net.run(get_params(net), elastic_net.full, images[:batch])
        assert out.is_contiguous(memory_format=torch.channels_last) == (batch >= 6)
        torch.testing.assert_close(out, net(images[:batch]))


def test_the_gradient_of_a_strided_shortcut_is_channels_last() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1, stride=2))
    elastic_net = elastic(net, torch.randn(2, 3, 9, 9))
    params = {name: tensor.requires_grad_() for name, tensor in get_params(net).items()}
    formats = []

    def record(grad: torch.Tensor) -> None:
        formats.append(grad.is_contiguous(memory_format=torch.channels_last))

    first = elastic_net.program.instructions[0]
    run = first.run

    def run_and_watch(env: Env, bound: BoundProgram) -> Any:
        value = run(env, bound)
        value.register_hook(record)
        return value

    first.run = run_and_watch
    out = elastic_net.run(params, elastic_net.full, torch.randn(4, 3, 9, 9))
    assert out.shape == (4, 8, 5, 5)
    out.sum().backward()
    assert formats == [True]


def test_only_narrow_layers_of_one_pixel_are_matrix_products() -> None:
    net = nn.Sequential(nn.Conv2d(2, 5, 3, padding=1), nn.Conv2d(5, 6, 1, bias=False))
    elastic_net, images = elastic(net, torch.randn(2, 2, 8, 8)), torch.randn(4, 2, 8, 8)
    pixels, stem = 4 * 64, 2 * 9
    for subnet, filters in ((elastic_net.full, 5), (elastic_net.select_prefix(0.4), 3)):
        params = elastic_net.take(get_params(net), subnet)
        with FlopCounterMode(display=False) as counter:
            elastic_net.run(params, subnet, images)
        macs = {
            str(key): n // 2 // pixels for key, n in counter.get_flop_counts()["Global"].items()
        }
        if subnet is elastic_net.full:
            assert macs == {"aten.convolution": filters * (stem + 6)}
        else:
            assert macs == {"aten.convolution": filters * stem, "aten.mm": filters * 6}
