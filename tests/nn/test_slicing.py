"""A subnet's parameters can be copied out and back."""

import numpy as np
import pytest
import torch
from tests.nn.zoo import ZOO
from torch import nn

from pliant.nn.elastic import Elastic, elastic
from pliant.nn.models import digits_cnn_bn
from pliant.nn.optimisers import Sgd
from pliant.nn.subnet import Subnet
from pliant.nn.trainer import SubnetTrainer
from pliant.params import Params, clone, get_params
from pliant.rng import rng_stream


def assert_equal(left: Params, right: Params) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


@pytest.fixture
def pair() -> tuple[Elastic, Params]:
    """Two filters, both read by the second layer; weights equal their positions."""
    net = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Flatten(), nn.Linear(8, 1, bias=False))
    params = {
        "0.weight": torch.tensor([[[[10.0]]], [[[20.0]]]]),
        "0.bias": torch.tensor([1.0, 2.0]),
        "2.weight": torch.arange(8.0).view(1, 8),
    }
    return elastic(net, torch.zeros(1, 1, 2, 2)), params


def keep_only(net: Elastic, *filters: int) -> Subnet:
    mask = np.isin(np.arange(net.sizes[0]), filters)
    return Subnet(net.fingerprint, (mask,), (1.0,))


def test_the_rows_and_columns_of_kept_filters_are_taken(pair: tuple[Elastic, Params]) -> None:
    net, params = pair
    small = net.take(params, keep_only(net, 1))
    assert {name: tensor.tolist() for name, tensor in small.items()} == {
        "0.weight": [[[[20.0]]]],
        "0.bias": [2.0],
        "2.weight": [[4.0, 5.0, 6.0, 7.0]],
    }


def test_putting_entries_back_leaves_the_rest_unchanged(pair: tuple[Elastic, Params]) -> None:
    net, params = pair
    second = keep_only(net, 1)
    changed = {name: -tensor for name, tensor in net.take(params, second).items()}
    full = net.put(params, changed, second)
    assert full["0.bias"].tolist() == [1.0, -2.0]
    assert full["2.weight"].tolist() == [[0.0, 1.0, 2.0, 3.0, -4.0, -5.0, -6.0, -7.0]]
    assert params["0.bias"].tolist() == [1.0, 2.0], "the caller's parameters do not change"


def test_counts_mark_the_kept_entries(pair: tuple[Elastic, Params]) -> None:
    net, params = pair
    first = keep_only(net, 0)
    values, counts = net.embed(params, net.take(params, first), first)
    assert values["0.weight"].flatten().tolist() == [10.0, 0.0]
    assert counts["0.weight"].flatten().tolist() == [1.0, 0.0]
    assert counts["2.weight"].tolist() == [[1.0] * 4 + [0.0] * 4]


def test_disjoint_subnets_add_up(pair: tuple[Elastic, Params]) -> None:
    net, params = pair
    parts = [
        net.embed(params, net.take(params, s), s) for s in (keep_only(net, 0), keep_only(net, 1))
    ]
    for name in params:
        assert torch.equal(parts[0][0][name] + parts[1][0][name], params[name])
        assert (parts[0][1][name] + parts[1][1][name] == 1).all()


@pytest.mark.parametrize("coupled", [True, False])
@pytest.mark.parametrize("name", ZOO)
def test_a_round_trip_changes_nothing(name: str, coupled: bool) -> None:
    module, x = ZOO[name]()
    net, params = elastic(module, x, coupled=coupled), get_params(module)
    blank = {name: torch.full_like(tensor, 7) for name, tensor in params.items()}
    for subnet in (
        net.full,
        net.draw(0.6, rng_stream(0)),
        net.select_prefix(0.3, net.make_rolling_orders(2)),
    ):
        small = net.take(params, subnet)
        assert_equal(net.put(params, small, subnet), params)
        assert_equal(net.take(net.put(blank, small, subnet), subnet), small)
        _, counts = net.embed(params, small, subnet)
        assert sum(int(count.sum()) for count in counts.values()) == net.count_params(subnet)


@pytest.mark.parametrize("name", ["plain", "dense", "auxiliary", "two_draw_product"])
def test_taken_tensors_are_copies(name: str) -> None:
    module, x = ZOO[name]()
    net, params = elastic(module, x), get_params(module)
    before = clone(params)
    for subnet in (net.full, net.draw(0.5, rng_stream(0))):
        for tensor in net.take(params, subnet).values():
            tensor.zero_()
        assert_equal(params, before)


def test_tensors_may_have_another_memory_format() -> None:
    module = digits_cnn_bn().to(memory_format=torch.channels_last)
    net, params = elastic(module, torch.zeros(1, 1, 28, 28)), get_params(module)
    assert any(not tensor.is_contiguous() for tensor in params.values())
    plain = {name: tensor.contiguous() for name, tensor in params.items()}
    subnet = net.draw(0.5, rng_stream(0))
    small = net.take(params, subnet)
    assert_equal(small, net.take(plain, subnet))
    doubled = {name: tensor * 2 for name, tensor in small.items()}
    assert_equal(net.put(params, doubled, subnet), net.put(plain, doubled, subnet))


def test_training_a_taken_subnet_equals_training_in_place() -> None:
    """A device that receives only its subnet gets bit-identical results."""
    module = digits_cnn_bn()
    net, start = elastic(module, torch.zeros(1, 1, 28, 28)), get_params(module)
    subnet, optimiser = net.draw(0.5, rng_stream(0)), Sgd(lr=0.1, momentum=0.9, weight_decay=1e-3)
    rng = rng_stream(0, "images")
    images = [torch.from_numpy(rng.random((4, 1, 28, 28), np.float32)) for _ in range(4)]

    zeros = {name: torch.zeros_like(tensor) for name, tensor in start.items()}
    subnet_trainer = SubnetTrainer(net, net.put(zeros, net.take(start, subnet), subnet), optimiser)
    subnet_trainer.switch(subnet)
    full_trainer = SubnetTrainer(net, start, optimiser)
    for image in images:
        subnet_trainer.step(image, lambda out: out.square().mean())
        full_trainer.switch(net.full)
        full_trainer.switch(subnet)
        full_trainer.step(image, lambda out: out.square().mean())

    result = net.put(start, net.take(subnet_trainer.params(), subnet), subnet)
    assert_equal(result, full_trainer.params())
