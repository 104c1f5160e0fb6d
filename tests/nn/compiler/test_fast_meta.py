import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from pliant.nn.compiler.fast_meta import FastMetaMode, MacCounter
from pliant.nn.models import MODELS


def collect_outputs(net: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the outputs of all modules of a network."""
    outputs: list[Tensor] = []
    hooks = [
        module.register_forward_hook(lambda module, args, out: outputs.append(out))
        for module in net.modules()
    ]
    with torch.no_grad():
        net(x)
    for hook in hooks:
        hook.remove()
    return outputs


@pytest.mark.parametrize("name", sorted(MODELS))
def test_shapes_strides_and_macs_match_torch(name):
    net = MODELS[name]().to("meta")
    channels, side = next(shape for shape in ((3, 32), (1, 28)) if _fits(net, shape))
    x = torch.empty((6, channels, side, side), device="meta")
    with FlopCounterMode(display=False) as torch_counter:
        expected = collect_outputs(net, x)
    with FastMetaMode(), MacCounter() as counter:
        outputs = collect_outputs(net, x)
    assert counter.macs == torch_counter.get_total_flops() // 2
    assert [(y.shape, y.stride(), y.dtype) for y in outputs] == [
        (y.shape, y.stride(), y.dtype) for y in expected
    ]


def _fits(net: nn.Module, shape: tuple[int, int]) -> bool:
    try:
        net(torch.empty((2, shape[0], shape[1], shape[1]), device="meta"))
    except RuntimeError:
        return False
    return True


INVALID = {
    "channels that do not fit": lambda x: nn.Conv2d(5, 2, 3, device="meta")(x),
    "a window larger than the image": lambda x: nn.Conv2d(3, 2, 40, device="meta")(x),
    "a pool larger than the image": lambda x: nn.MaxPool2d(40)(x),
    "padding beyond half the window": lambda x: nn.AvgPool2d(2, padding=2)(x),
    "rows that do not fit": lambda x: nn.Linear(7, 2, device="meta")(x.flatten(1)),
    "parts of different sizes": lambda x: torch.cat([x, x[:, :, 1:]], 1),
    "another dtype": lambda x: nn.Conv2d(3, 2, 3, device="meta", dtype=torch.float64)(x),
    "a sum of shapes that do not broadcast": lambda x: x + x[:, :2],
}


@pytest.mark.parametrize("case", sorted(INVALID))
def test_an_invalid_operation_raises_torchs_error(case):
    x = torch.empty((6, 3, 32, 32), device="meta")
    with pytest.raises((RuntimeError, ValueError)) as expected:
        INVALID[case](x)
    with FastMetaMode(), pytest.raises(type(expected.value)) as caught:
        INVALID[case](x)
    assert str(caught.value) == str(expected.value)


LESS_COMMON = {
    "a pool with ceil_mode": lambda x: nn.MaxPool2d(3, 2, ceil_mode=True)(x),
    "an adaptive pool": lambda x: nn.AdaptiveMaxPool2d((2, 5))(x),
    "an adaptive pool of one image": lambda x: nn.AdaptiveMaxPool2d(2)(x[0]),
    "a leaky activation": lambda x: nn.LeakyReLU(0.2)(x),
    "a dilated pool": lambda x: nn.MaxPool2d(3, 2, dilation=2, padding=1)(x),
    "a strided, dilated, grouped convolution": lambda x: nn.Conv2d(
        3, 6, 3, (2, 3), 2, (2, 1), groups=3, bias=False, device="meta"
    )(x),
    "a transposed convolution": lambda x: nn.ConvTranspose2d(3, 6, 3, 2, device="meta")(x),
    "a 1-d convolution": lambda x: nn.Conv1d(3, 6, 3, device="meta")(x.flatten(2)),
    "a broadcast sum": lambda x: x + x[:, :1],
    "a sum of two dtypes": lambda x: x + x.to(torch.float64),
    "a sum with alpha": lambda x: torch.add(x, x, alpha=2),
    "a mean with keepdim": lambda x: x.mean((-1, 2), keepdim=True),
    "a mean over everything": lambda x: x.mean(),
    "a transposed product": lambda x: x.flatten(1).T @ x.flatten(1),
    "a concatenation along a negative axis": lambda x: torch.cat([x, x[..., :3]], -1),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last).relu(),
    "a norm in evaluation mode": lambda x: nn.BatchNorm2d(3, device="meta").eval()(x),
    "integers": lambda x: (x > 0).long() + 1,
}


@pytest.mark.parametrize("case", sorted(LESS_COMMON))
def test_less_common_operations_match_torch(case):
    x = torch.empty((6, 3, 32, 32), device="meta")
    expected = LESS_COMMON[case](x)
    with FastMetaMode():
        out = LESS_COMMON[case](x)
    assert (out.shape, out.stride(), out.dtype) == (
        expected.shape,
        expected.stride(),
        expected.dtype,
    )


def test_an_in_place_operation_returns_its_input():
    x = torch.empty((6, 3), device="meta")
    with FastMetaMode():
        assert x.relu_() is x


START_UPS = """
import sys
import torch
import pliant as pl
from pliant.split.session import Session

pl.elastic(pl.models.resnet20(), torch.zeros(1, 3, 32, 32))
pl.elastic(pl.models.digits_cnn(), torch.zeros(1, 1, 28, 28))
data = pl.data.digits().share(pl.Iid(), devices=1, proxy=7800)
method = pl.AdaSplit(cut="features.2")
Session(method, pl.models.digits_cnn(), data, pl.Fleet(size=1), 0)
sys.exit("torch._dynamo" in sys.modules or "sympy" in sys.modules)
"""


def test_runs_with_common_networks_start_without_torchs_compiler():
    assert subprocess.run([sys.executable, "-c", START_UPS], check=False).returncode == 0
