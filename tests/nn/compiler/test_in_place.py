"""A ReLU or a sum overwrites an input where nothing else needs it."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pliant.nn.compiler.in_place import find_overwritten_input
from pliant.nn.compiler.trace import trace
from pliant.nn.elastic import elastic
from pliant.params import get_params


class Block(nn.Module):
    def __init__(self, case: str) -> None:
        super().__init__()
        self.case = case
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.point, self.last = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        if self.case == "norm":
            x = F.relu(self.norm(x))
        elif self.case == "read twice":  # the convolution's gradient needs the norm's result
            x = self.norm(x)
            x = self.point(x) * F.relu(x)
        elif self.case == "sum":
            x = torch.relu(self.norm(x) + x)
        elif self.case == "sum only":
            x = self.norm(x) + x
        elif self.case == "sum on the right":
            x = x.mean((2, 3), keepdim=True) + self.norm(x)
        elif self.case == "broadcast":  # neither side has the shape of the result
            x = self.norm(x).mean((2, 3), keepdim=True) + x.mean((1, 2), keepdim=True)
            x = x.expand(-1, -1, 8, -1)
        elif self.case == "number":
            x = self.norm(x) + 1
        elif self.case == "itself":
            x = self.norm(x)
            x = x + x
        elif self.case == "multiple":
            x = torch.add(self.norm(x), x, alpha=2)
        elif self.case == "view":  # the second half is read later
            first, second = self.norm(x).chunk(2, 1)
            x = torch.cat([F.relu(first), second], 1)
        elif self.case == "point":
            x = self.point(x).relu()
        out: Tensor = self.last(x)
        return out


CASES = {"norm": True, "read twice": False, "sum": True, "sum only": True}
CASES |= {"sum on the right": True, "broadcast": False, "number": False, "itself": False}
CASES |= {"multiple": False, "view": False, "point": False}


@pytest.mark.parametrize("case", CASES)
def test_a_relu_or_sum_overwrites_what_nothing_else_reads(case: str) -> None:
    net, images = Block(case).double(), torch.randn(3, 3, 8, 8, dtype=torch.float64)
    graph = trace(net, (images[:2],))
    modules = dict(net.named_modules())
    assert any(find_overwritten_input(node, modules) for node in graph.nodes) == CASES[case]
    plain = copy.deepcopy(net)
    loss = plain(images).square().sum()
    expected = torch.autograd.grad(loss, list(plain.parameters()), allow_unused=True)
    elastic_net = elastic(net, images[:2])
    params = {name: p.requires_grad_(p.is_floating_point()) for name, p in get_params(net).items()}
    for name in dict(net.named_buffers()):
        params[name].requires_grad_(False)
    loss = elastic_net.run(params, elastic_net.full, images).square().sum()
    leaves = [params[name] for name, _ in net.named_parameters()]
    actual = torch.autograd.grad(loss, leaves, allow_unused=True)
    torch.testing.assert_close(actual, expected)
