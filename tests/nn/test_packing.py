"""A subnet's parameters travel alone and come back to their places."""

import numpy as np
import pytest
import torch
from torch import nn
from zoo import ZOO

from pliant.nn.elastic import Elastic, elastic
from pliant.nn.learner import Learner
from pliant.nn.models import digits_cnn_bn
from pliant.nn.optimiser import Sgd
from pliant.nn.subnet import Subnet
from pliant.params import Params, clone, params_of
from pliant.rng import stream


def same(left: Params, right: Params) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


@pytest.fixture
def pair() -> tuple[Elastic, Params]:
    """Two filters, of which the second layer reads both; weights are their own positions."""
    net = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Flatten(), nn.Linear(8, 1, bias=False))
    params = {
        "0.weight": torch.tensor([[[[10.0]]], [[[20.0]]]]),
        "0.bias": torch.tensor([1.0, 2.0]),
        "2.weight": torch.arange(8.0).view(1, 8),
    }
    return elastic(net, torch.zeros(1, 1, 2, 2)), params


def only(net: Elastic, *kept: int) -> Subnet:
    mask = np.isin(np.arange(net.sizes[0]), kept)
    return Subnet(net.fingerprint, (mask,), (1.0,))


def test_what_is_taken_are_the_rows_and_columns_of_kept_filters(
    pair: tuple[Elastic, Params],
) -> None:
    net, params = pair
    small = net.take(params, only(net, 1))
    assert {name: tensor.tolist() for name, tensor in small.items()} == {
        "0.weight": [[[[20.0]]]],
        "0.bias": [2.0],
        "2.weight": [[4.0, 5.0, 6.0, 7.0]],
    }


def test_what_is_put_back_leaves_the_rest_alone(pair: tuple[Elastic, Params]) -> None:
    net, params = pair
    second = only(net, 1)
    changed = {name: -tensor for name, tensor in net.take(params, second).items()}
    full = net.put(params, changed, second)
    assert full["0.bias"].tolist() == [1.0, -2.0]
    assert full["2.weight"].tolist() == [[0.0, 1.0, 2.0, 3.0, -4.0, -5.0, -6.0, -7.0]]
    assert params["0.bias"].tolist() == [1.0, 2.0], "the caller's own are not touched"


def test_counts_say_where_there_is_an_entry(pair: tuple[Elastic, Params]) -> None:
    net, params = pair
    first = only(net, 0)
    values, counts = net.embed(params, net.take(params, first), first)
    assert values["0.weight"].flatten().tolist() == [10.0, 0.0]
    assert counts["0.weight"].flatten().tolist() == [1.0, 0.0]
    assert counts["2.weight"].tolist() == [[1.0] * 4 + [0.0] * 4]


def test_parts_of_disjoint_subnets_add_up(pair: tuple[Elastic, Params]) -> None:
    net, params = pair
    parts = [net.embed(params, net.take(params, s), s) for s in (only(net, 0), only(net, 1))]
    for name in params:
        assert torch.equal(parts[0][0][name] + parts[1][0][name], params[name])
        assert (parts[0][1][name] + parts[1][1][name] == 1).all()


@pytest.mark.parametrize("coupled", [True, False])
@pytest.mark.parametrize("name", ZOO)
def test_a_round_trip_changes_nothing(name: str, coupled: bool) -> None:
    module, x = ZOO[name]()
    net, params = elastic(module, x, coupled=coupled), params_of(module)
    blank = {name: torch.full_like(tensor, 7) for name, tensor in params.items()}
    for subnet in (net.full, net.draw(0.6, stream(0)), net.first(0.3, net.rolled(2))):
        small = net.take(params, subnet)
        same(net.put(params, small, subnet), params)
        same(net.take(net.put(blank, small, subnet), subnet), small)
        _, counts = net.embed(params, small, subnet)
        assert sum(int(count.sum()) for count in counts.values()) == net.parameters(subnet)


@pytest.mark.parametrize("name", ["plain", "dense", "auxiliary", "two_draw_product"])
def test_what_is_taken_is_a_copy(name: str) -> None:
    module, x = ZOO[name]()
    net, params = elastic(module, x), params_of(module)
    before = clone(params)
    for subnet in (net.full, net.draw(0.5, stream(0))):
        for tensor in net.take(params, subnet).values():
            tensor.zero_()
        same(params, before)


def test_tensors_may_lie_in_another_order() -> None:
    module = digits_cnn_bn().to(memory_format=torch.channels_last)
    net, params = elastic(module, torch.zeros(1, 1, 28, 28)), params_of(module)
    assert any(not tensor.is_contiguous() for tensor in params.values())
    plain = {name: tensor.contiguous() for name, tensor in params.items()}
    subnet = net.draw(0.5, stream(0))
    small = net.take(params, subnet)
    same(small, net.take(plain, subnet))
    doubled = {name: tensor * 2 for name, tensor in small.items()}
    same(net.put(params, doubled, subnet), net.put(plain, doubled, subnet))


def test_training_what_was_packed_is_training_in_place() -> None:
    """A device that gets only its subnet ends with the bits of one that has the whole network."""
    module = digits_cnn_bn()
    net, start = elastic(module, torch.zeros(1, 1, 28, 28)), params_of(module)
    subnet, way = net.draw(0.5, stream(0)), Sgd(lr=0.1, momentum=0.9, weight_decay=1e-3)
    rng = stream(0, "images")
    images = [torch.from_numpy(rng.random((4, 1, 28, 28), np.float32)) for _ in range(4)]

    nothing = {name: torch.zeros_like(tensor) for name, tensor in start.items()}
    apart = Learner(net, net.put(nothing, net.take(start, subnet), subnet), way)
    apart.switch(subnet)
    whole = Learner(net, start, way)
    for image in images:
        apart.step(image, lambda out: out.square().mean())
        whole.switch(net.full)
        whole.switch(subnet)
        whole.step(image, lambda out: out.square().mean())

    back = net.put(start, net.take(apart.params(), subnet), subnet)
    same(back, whole.params())
