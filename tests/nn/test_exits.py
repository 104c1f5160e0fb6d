"""Networks with exits: shallower networks, their outputs and their costs."""

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from pliant.nn.elastic import elastic
from pliant.nn.exits import ExitNetwork, count_exits, select_depth
from pliant.nn.models import cifar_cnn, exit_cnn
from pliant.params import get_params


def make_net():
    torch.manual_seed(0)
    return elastic(exit_cnn(3, filters=(4, 6, 8), channels=1), torch.rand(2, 1, 8, 8))


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("all_exits", [False, True])
def test_a_part_computes_what_its_stages_compute(depth, all_exits):
    net, x = make_net(), torch.rand(4, 1, 8, 8)
    part, module = select_depth(net, depth, all_exits), net.module.train()
    output = part.run(get_params(module), part.full, x)
    value, expected = x, []
    with torch.no_grad():
        for stage, head in zip(module.stages[:depth], module.exits, strict=False):
            value = stage(value)
            expected.append(head(value))
    found = output if all_exits else (output,)
    for actual, wanted in zip(found, expected if all_exits else expected[-1:], strict=True):
        torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("all_exits", [False, True])
def test_the_macs_of_a_part_match_torch(depth, all_exits):
    net = make_net()
    part = select_depth(net, depth, all_exits)
    with FlopCounterMode(display=False) as counter:
        outputs = part.module(torch.rand(2, 1, 8, 8))
        sum(output.sum() for output in (outputs if all_exits else [outputs])).backward()
    assert part.macs(part.full, training=True) == counter.get_total_flops() / 4


def test_full_depth_is_the_network_itself():
    net = make_net()
    assert select_depth(net, 3) is net
    assert select_depth(net, 2) is select_depth(net, 2)
    assert net.module.depth == 3
    assert not net.module.all_exits


def test_a_part_has_the_parameters_of_the_network():
    net = make_net()
    part = select_depth(net, 1)
    params = {name: torch.zeros_like(tensor) for name, tensor in get_params(net.module).items()}
    assert get_params(part.module).keys() == params.keys()
    assert not functional_call(part.module.eval(), params, (torch.rand(2, 1, 8, 8),)).any()


def test_other_networks_are_refused():
    net = elastic(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), torch.zeros(1, 1, 2, 2))
    with pytest.raises(ValueError, match=r"Expected a network with exits .* got a Sequential"):
        count_exits(net)


@pytest.mark.parametrize(("stages", "exits"), [(0, 0), (2, 1)])
def test_each_stage_needs_an_exit(stages, exits):
    layers = [[nn.Linear(2, 2) for _ in range(count)] for count in (stages, exits)]
    with pytest.raises(ValueError, match=f"got {stages} stages, {exits} exits"):
        ExitNetwork(*layers)


def test_at_full_depth_it_costs_what_the_cifar_network_costs():
    x = torch.zeros(1, 3, 32, 32)
    deep, plain = (elastic(make(), x, check=False) for make in (exit_cnn, cifar_cnn))
    assert deep.macs(deep.full, training=True) == plain.macs(plain.full, training=True)
