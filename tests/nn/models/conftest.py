from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode


@pytest.fixture
def macs() -> Callable[..., dict[str, int]]:
    """Count the MACs of one image with torch, on meta tensors."""

    def count(net: nn.Module, *shape: int) -> dict[str, int]:
        net = net.to("meta").eval()
        with FlopCounterMode(display=False) as counter:
            net(torch.empty(1, *shape, device="meta"))
        flops = {str(op): n // 2 for op, n in counter.get_flop_counts()["Global"].items()}
        conv, linear = flops.pop("aten.convolution", 0), flops.pop("aten.addmm", 0)
        assert not flops, "expected MACs only in convolutions and linear layers"
        return {"conv": conv, "linear": linear}

    return count


@pytest.fixture
def parameters() -> Callable[[nn.Module], int]:
    return lambda net: sum(p.numel() for p in net.parameters())


@pytest.fixture
def convolutions() -> Callable[[nn.Module], int]:
    return lambda net: sum(isinstance(module, nn.Conv2d) for module in net.modules())
