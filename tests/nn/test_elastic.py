"""A compact pass equals the full-size pass with masks, at the cost that torch counts."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from tests.nn.compare_masked import assert_compact_equals_masked, sample_subnets
from tests.nn.zoo import ZOO
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from pliant.nn.elastic import elastic
from pliant.nn.models import INPUT_SHAPES, MODELS
from pliant.params import get_params

# The other DenseNets repeat the same blocks more often, and wide layers have no rules of their own.
BUNDLED = [name for name in MODELS if not name.startswith("densenet") or name == "densenet19"]
NARROW = {"resnet18": {"width": 8}, "vgg11": {"width": 8}, "mobilenet_v2": {"width": 0.25}}


def make_bundled(name: str) -> tuple[nn.Module, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = MODELS[name](**NARROW.get(name, {}))
        return net.double(), torch.randn(2, *INPUT_SHAPES[name], dtype=torch.float64)


@pytest.mark.parametrize("coupled", [True, False])
@pytest.mark.parametrize("name", ZOO)
def test_compact_equals_masked_in_the_zoo(name: str, coupled: bool) -> None:
    module, x = ZOO[name]()
    assert_compact_equals_masked(module, x, coupled=coupled, seeds=range(3 if coupled else 1))


@pytest.mark.parametrize("name", BUNDLED)
def test_compact_equals_masked_for_bundled_networks(name: str) -> None:
    assert_compact_equals_masked(*make_bundled(name), coupled=True)


def count_macs(run: Callable[[], object]) -> int:
    # torch does not count its fused attention on CPUs
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops()) // 2


@pytest.mark.parametrize("coupled", [True, False])
@pytest.mark.parametrize("name", [*ZOO, *BUNDLED])
def test_the_macs_of_a_subnet_match_torch(name: str, coupled: bool) -> None:
    module, x = ZOO[name]() if name in ZOO else make_bundled(name)
    net, params = elastic(module, x, coupled=coupled, check=False), get_params(module)
    for subnet in sample_subnets(net, 1):
        small = net.take(params, subnet)
        macs = count_macs(partial(net.run, small, subnet, x))
        assert macs == len(x) * net.macs(subnet)


class DirectBatchNorm(nn.Module):
    """Batch norm by torch's own function, whose order of arguments is not that of F.batch_norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 2)
        self.scale, self.shift = nn.Parameter(torch.rand(4)), nn.Parameter(torch.rand(4))
        self.register_buffer("mean", torch.rand(4))
        self.register_buffer("variance", torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        params = (self.scale, self.shift, self.mean, self.variance)
        return self.head(
            torch.batch_norm(self.stem(x), *params, True, 0.1, 1e-5, False).mean((2, 3))
        )


def test_torch_batch_norm_is_computed_as_in_the_network() -> None:
    module, x = DirectBatchNorm(), torch.rand(2, 3, 8, 8)
    net, params = elastic(module, x), get_params(module)
    small = net.take(params, net.full)
    torch.testing.assert_close(net.run(small, net.full, x), module(x))
    for name, buffer in module.named_buffers():
        torch.testing.assert_close(small[name], buffer)
