"""Memory of training steps against tensors that PyTorch writes, saves and allocates."""

import numpy as np
import pytest
import torch
from tests.nn.zoo import ZOO
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pliant.nn.elastic import Elastic, elastic
from pliant.nn.filter_counts import bound_drawn_filters, count_prefix_filters
from pliant.nn.memory import bound_memory
from pliant.nn.models import INPUT_SHAPES, MODELS, digits_cnn
from pliant.nn.optimisers import Adam, Sgd
from pliant.nn.subnet import Subnet
from pliant.nn.trainer import SubnetTrainer
from pliant.params import get_params
from pliant.rng import rng_stream

BATCH = 4


class CountWritten(TorchDispatchMode):
    """Count the elements of new tensors with one entry per sample."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.known, self.count = [x.untyped_storage()], 0  # kept, so that no address is reused

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if not (isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dim()):
                continue
            storage = tensor.untyped_storage()
            is_new = all(storage._cdata != known._cdata for known in self.known)
            if is_new and len(tensor) == BATCH:
                self.known.append(storage)
                self.count += tensor.numel()
        return result


def count_written(net: nn.Module, x: Tensor) -> float:
    """Return the activations per sample that a plain forward pass writes."""
    with CountWritten(x) as counter:
        net.train()(x)
    return counter.count / BATCH


def count_saved(net: nn.Module, x: Tensor) -> float:
    """Return the numbers per sample that autograd keeps of a plain forward pass, input excepted."""
    tensors = (x, *net.parameters(), *net.buffers())
    fixed = {tensor.untyped_storage()._cdata for tensor in tensors}
    saved = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in fixed and tensor.is_floating_point() and len(tensor) == BATCH:
            saved[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        net.train()(x)
    return sum(storage.nbytes() for storage in saved.values()) / 4 / BATCH


# LeNet's local response norm is one operation here and several in PyTorch; fused attention writes
# its result so that joining the heads copies nothing, which is counted here
@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"lenet", "lenet_small", "vit_small"}))
def test_bundled_networks_write_the_activations_that_are_counted(name: str) -> None:
    net, x = MODELS[name](), torch.rand(BATCH, *INPUT_SHAPES[name])
    traced = elastic(net, x[:1], check=False)
    counted = bound_memory(traced, np.array([traced.sizes])).activations[0]
    assert counted == traced.count_activations(traced.full) == count_written(net, x)
    assert 0.5 * counted < count_saved(net, x) <= counted


def test_a_subnet_needs_what_a_narrower_network_needs() -> None:
    wide, narrow = digits_cnn(filters=(12, 24)), digits_cnn(filters=(6, 12))
    x = torch.rand(BATCH, 1, 28, 28)
    net = elastic(wide, x[:1], check=False)
    bounds = bound_memory(net, count_prefix_filters(net, ((0.5, 0.5), (0.0, 0.0))))
    for row, plain in enumerate((narrow, wide)):
        assert bounds.params[row] == sum(p.numel() for p in plain.parameters())
        assert bounds.activations[row] == count_written(plain, x)


@pytest.mark.parametrize(("optimiser", "slots"), [(Sgd(), 0), (Sgd(momentum=0.9), 1), (Adam(), 2)])
def test_a_step_holds_parameters_gradients_optimiser_state_and_activations(
    optimiser: Sgd | Adam, slots: int
) -> None:
    module = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    net = elastic(module, torch.zeros(1, 1, 8, 8))
    bounds = bound_memory(net, np.array([[2], [4]]))
    params = [2 * 9 + 2 + 72 * 2 + 2, 4 * 9 + 4 + 144 * 2 + 2]
    activations = [2 * 36 * 2 + 2, 4 * 36 * 2 + 2]
    expected = [
        [4 * (p * (2 + slots) + a * batch) for p, a in zip(params, activations, strict=True)]
        for batch in (8, 32)
    ]
    assert bounds.step_bytes(optimiser, np.array([8, 32])).tolist() == expected
    trainer = SubnetTrainer(net, get_params(module), optimiser)
    state = [flat.numel() for flats in trainer._subnet_state_flats for flat in flats]
    assert sum(state) == slots * params[1]


def check_bounds(net: Elastic, subnet: Subnet, counts: list[int]) -> None:
    bounds = bound_memory(net, np.array([counts]))
    trained = net.trainable_names
    params = sum(n for name, n in net.count_entries(subnet).items() if name in trained)
    assert params <= bounds.params[0]
    assert net.count_activations(subnet) <= bounds.activations[0]


@pytest.mark.parametrize("coupled", [True, False])
@pytest.mark.parametrize("name", ZOO)
def test_no_drawn_subnet_exceeds_the_bound_of_its_row(name: str, coupled: bool) -> None:
    net = elastic(*ZOO[name](), coupled=coupled, check=False)
    if not net.sites:
        return
    for rate in (0.2, 0.5, 0.8):
        rates = ((rate,) * len(net.sites),)
        for sampling in ("bernoulli", "rounded", "blocks"):
            counts = bound_drawn_filters(net, rates, sampling)[0].tolist()
            for draw in range(6):
                subnet = net.draw(rates[0], rng_stream(draw), sampling)
                check_bounds(net, subnet, counts)
        prefix = count_prefix_filters(net, rates)[0].tolist()
        for draw in range(6):
            orders = net.sample_orders(rng_stream(draw, "order"))
            check_bounds(net, net.select_prefix(rates[0], orders), prefix)


@pytest.mark.parametrize("name", ["digits_cnn", "resnet20", "densenet40", "mobilenet_v2"])
def test_the_bounds_of_bundled_networks_are_exact_for_whole_filters(name: str) -> None:
    net = elastic(MODELS[name](), torch.zeros(1, *INPUT_SHAPES[name]), check=False)
    subnet = net.select_prefix(0.5)
    bounds = bound_memory(net, np.array([subnet.counts]))
    trained = net.trainable_names
    params = sum(n for name, n in net.count_entries(subnet).items() if name in trained)
    assert (bounds.params[0], bounds.activations[0]) == (params, net.count_activations(subnet))


def test_independent_filters_may_all_be_kept_and_rounded_ones_at_most_one_more() -> None:
    net = elastic(digits_cnn(filters=(12, 24)), torch.zeros(1, 1, 28, 28))
    rates = ((0.7, 0.7), (0.5, 0.0))
    assert bound_drawn_filters(net, rates, "bernoulli").tolist() == [[12, 24], [12, 24]]
    assert bound_drawn_filters(net, rates, "rounded").tolist() == [[4, 8], [6, 24]]
    assert bound_drawn_filters(net, rates, "blocks").tolist() == [[4, 8], [8, 24]]
