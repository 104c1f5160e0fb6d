"""The memory format of images depends on the mini-batch and the network."""

import torch
from torch import nn

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
