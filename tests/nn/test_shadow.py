import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from pliant.nn.models import MODELS
from pliant.nn.shadow import Shadow


def on_meta(net: nn.Module, x: Tensor) -> list[Tensor]:
    """Return what every module of a network gives."""
    found: list[Tensor] = []
    hooks = [
        module.register_forward_hook(lambda module, given, out: found.append(out))
        for module in net.modules()
    ]
    with torch.no_grad():
        net(x)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("name", sorted(MODELS))
def test_shapes_and_strides_are_those_of_torch(name):
    net = MODELS[name]().to("meta")
    channels, side = next(shape for shape in ((3, 32), (1, 28)) if _fits(net, shape))
    x = torch.empty((6, channels, side, side), device="meta")
    wanted = on_meta(net, x)
    with Shadow():
        found = on_meta(net, x)
    assert [(y.shape, y.stride(), y.dtype) for y in found] == [
        (y.shape, y.stride(), y.dtype) for y in wanted
    ]


def _fits(net: nn.Module, shape: tuple[int, int]) -> bool:
    try:
        net(torch.empty((2, shape[0], shape[1], shape[1]), device="meta"))
    except RuntimeError:
        return False
    return True


ODD = {
    "channels that do not fit": lambda x: nn.Conv2d(5, 2, 3, device="meta")(x),
    "a window larger than the picture": lambda x: nn.Conv2d(3, 2, 40, device="meta")(x),
    "a pool larger than the picture": lambda x: nn.MaxPool2d(40)(x),
    "padding beyond half the window": lambda x: nn.AvgPool2d(2, padding=2)(x),
    "rows that do not fit": lambda x: nn.Linear(7, 2, device="meta")(x.flatten(1)),
    "parts that do not fit": lambda x: torch.cat([x, x[:, :, 1:]], 1),
    "another type": lambda x: nn.Conv2d(3, 2, 3, device="meta", dtype=torch.float64)(x),
    "shapes that do not add up": lambda x: x + x[:, :2],
}


@pytest.mark.parametrize("what", sorted(ODD))
def test_what_is_wrong_gets_the_error_of_torch(what):
    x = torch.empty((6, 3, 32, 32), device="meta")
    with pytest.raises((RuntimeError, ValueError)) as wanted:
        ODD[what](x)
    with Shadow(), pytest.raises(type(wanted.value)) as found:
        ODD[what](x)
    assert str(found.value) == str(wanted.value)


ORDINARY = {
    "a ceiled pool": lambda x: nn.MaxPool2d(3, 2, ceil_mode=True)(x),
    "a dilated pool": lambda x: nn.MaxPool2d(3, 2, dilation=2, padding=1)(x),
    "a strided, dilated, grouped convolution": lambda x: nn.Conv2d(
        3, 6, 3, (2, 3), 2, (2, 1), groups=3, bias=False, device="meta"
    )(x),
    "a transposed convolution": lambda x: nn.ConvTranspose2d(3, 6, 3, 2, device="meta")(x),
    "a convolution over one axis": lambda x: nn.Conv1d(3, 6, 3, device="meta")(x.flatten(2)),
    "a broadcast sum": lambda x: x + x[:, :1],
    "a sum of types": lambda x: x + x.to(torch.float64),
    "a sum with a factor": lambda x: torch.add(x, x, alpha=2),
    "a mean that keeps its axes": lambda x: x.mean((-1, 2), keepdim=True),
    "a mean over everything": lambda x: x.mean(),
    "a transposed product": lambda x: x.flatten(1).T @ x.flatten(1),
    "values joined from behind": lambda x: torch.cat([x, x[..., :3]], -1),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last).relu(),
    "a norm of given statistics": lambda x: nn.BatchNorm2d(3, device="meta").eval()(x),
    "integers": lambda x: (x > 0).long() + 1,
}


@pytest.mark.parametrize("what", sorted(ORDINARY))
def test_what_is_less_common_has_the_shape_that_torch_gives_it(what):
    x = torch.empty((6, 3, 32, 32), device="meta")
    wanted = ORDINARY[what](x)
    with Shadow():
        found = ORDINARY[what](x)
    assert (found.shape, found.stride(), found.dtype) == (
        wanted.shape,
        wanted.stride(),
        wanted.dtype,
    )


def test_in_place_gives_what_was_given():
    x = torch.empty((6, 3), device="meta")
    with Shadow():
        assert x.relu_() is x


def test_a_common_network_is_traced_without_torch_s_compiler():
    code = (
        "import sys, torch; from pliant.nn.models import digits_cnn, resnet20;"
        "from pliant.nn.elastic import elastic;"
        "elastic(resnet20(), torch.zeros(1, 3, 32, 32));"
        "elastic(digits_cnn(), torch.zeros(1, 1, 28, 28));"
        "sys.exit('torch._dynamo' in sys.modules or 'sympy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
