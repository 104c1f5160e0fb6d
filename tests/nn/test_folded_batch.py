"""Networks that fold the batch into another axis, or another axis into the batch: exact costs."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from tests.nn.compare_masked import assert_compact_equals_masked, sample_subnets
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from pliant.nn.elastic import elastic
from pliant.nn.filter_counts import make_count_costs
from pliant.params import get_params


class Backbone(nn.Module):
    """Ordinary, depthwise and strided convolutions over images of 3 channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.depthwise = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, groups=6)
        self.last, self.head = nn.Conv2d(6, 4, 1, stride=2), nn.Linear(4, 3)

    def extract(self, x: Tensor) -> Tensor:
        x = self.last(torch.relu(self.depthwise(self.stem(x))))
        return torch.relu(x).mean((2, 3))


class Frames(Backbone):
    """A clip, each frame of which is an image of a larger batch."""

    def forward(self, x: Tensor) -> Tensor:  # x: (batch, time, channel, h, w)
        features = self.extract(x.flatten(0, 1))
        out: Tensor = self.head(features.view(x.shape[0], x.shape[1], 4).mean(1))
        return out


class Flipped(Backbone):
    """An image and its mirror image, joined along the batch."""

    def forward(self, x: Tensor) -> Tensor:
        features = self.extract(torch.cat([x, x.flip(3)], 0))
        out: Tensor = self.head(features)
        return out[: x.shape[0]] + out[x.shape[0] :]


class Steps(Backbone):
    """Frames of a clip in the rows of a linear layer, with time before the batch."""

    def forward(self, x: Tensor) -> Tensor:
        features = self.extract(x.transpose(0, 1).flatten(0, 1))
        out: Tensor = self.head(features.view(x.shape[1], x.shape[0], 4)).sum(0)
        return out


class OneSignal(nn.Module):
    """All signals of a batch, joined along time."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(2, 4, 3, padding=1), nn.Conv1d(4, 4, 3, padding=1)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, length = x.shape
        joined = x.transpose(0, 1).reshape(1, channels, batch * length)
        features = self.second(torch.relu(self.first(joined)))
        out: Tensor = self.head(features.view(4, batch, length).mean(2).t())
        return out


class OwnFilters(Backbone):
    """A convolution with filters of its own for each sample, as groups of channels."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.gate = nn.Parameter(torch.randn(3, 4, 1, 1)), nn.Linear(4, 3)
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        batch = x.shape[0]
        gates = self.gate(self.extract(x)).view(batch, 3, 1, 1, 1)
        images = self.last(self.stem(x)).reshape(1, batch * 4, 3, 3)
        filters = (gates * self.weight).reshape(batch * 3, 4, 1, 1)
        images = F.conv2d(images, filters, groups=batch).view(batch, 3, 3, 3)
        out: Tensor = self.head(images.mean((2, 3)))
        return out


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "frames": (Frames, (5, 3, 6, 6)),
    "flipped": (Flipped, (3, 6, 6)),
    "steps": (Steps, (4, 3, 6, 5)),
    "one_signal": (OneSignal, (2, 10)),
    "own_filters": (OwnFilters, (3, 6, 6)),
}


def make_case(name: str) -> tuple[nn.Module, Tensor]:
    make, shape = CASES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make().double(), torch.randn(2, *shape, dtype=torch.float64)


@pytest.mark.parametrize("name", CASES)
def test_every_row_of_a_sample_is_counted(name: str) -> None:
    module, x = make_case(name)
    net, params = elastic(module, x), get_params(module)
    for subnet in [net.full, *sample_subnets(net, 0)]:
        with FlopCounterMode(display=False) as counter:
            net.run(net.take(params, subnet), subnet, x)
        assert int(counter.get_total_flops()) == 2 * len(x) * net.macs(subnet)


def test_a_clip_costs_its_frames() -> None:
    net = elastic(*make_case("frames"))
    # per frame: 6 filters x 3 channels x 9 at 6x6, 6 x 9 at 4x4, 4 filters x 6 channels at 2x2
    frame = 6 * 3 * 9 * 36 + 6 * 9 * 16 + 4 * 6 * 4
    assert net.macs(0.0) == 5 * frame + 4 * 3
    costs = make_count_costs(net)
    assert costs is not None
    assert costs.macs(torch.tensor([net.sizes]).numpy())[0] == net.macs(0.0, training=True)


@pytest.mark.parametrize("name", CASES)
def test_each_is_computed_as_with_masks(name: str) -> None:
    compare = partial(assert_compact_equals_masked, *make_case(name))
    compare(coupled=True)
    compare(coupled=False, seeds=[1])
