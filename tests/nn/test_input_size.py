"""A network at another input size: the same parameters and subnets, exact there too."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.nn.compare_masked import assert_close, run_compact, run_masked, sample_subnets
from tests.nn.test_trainer import OPTIMISERS
from tests.nn.zoo import ZOO
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from pliant.nn import elastic as elastic_module
from pliant.nn.elastic import elastic
from pliant.nn.filter_counts import make_count_costs
from pliant.nn.models import mobilenet_v2, resnet20
from pliant.nn.optimisers import Optimiser
from pliant.nn.pareto_table import uniform_table
from pliant.nn.trainer import SubnetTrainer
from pliant.params import get_params
from pliant.rng import rng_stream

FIXED_SIZE = {"plain", "layer_norms"}  # a flattened image, and a norm of whole images
SIZES = {1: [(31,), (16,)], 2: [(12, 12), (7, 10)], 3: [(6, 2, 4)]}


def make_pairs() -> list[Any]:
    dims = {name: ZOO[name]()[1].dim() - 2 for name in ZOO if name not in FIXED_SIZE}
    return [
        pytest.param(name, size, id=f"{name}-{'x'.join(map(str, size))}")
        for name in dims
        for size in SIZES[dims[name]]
    ]


def sample_input(x: Tensor, size: tuple[int, ...]) -> Tensor:
    values = rng_stream(0, "input", *size).standard_normal((2, x.shape[1], *size))
    return torch.from_numpy(values).to(x.dtype)


@pytest.mark.parametrize(("name", "size"), make_pairs())
def test_a_subnet_of_the_traced_size_is_exact_at_another(name: str, size: tuple[int, ...]) -> None:
    module, x = ZOO[name]()
    net, params = elastic(module, x, check=False), get_params(module)
    x = sample_input(x, size)
    resized = net.at(*size)
    for subnet in sample_subnets(net, 0):
        outputs, tensors = run_compact(resized, params, subnet, x)
        masked_outputs, masked_tensors = run_masked(net, module, subnet, x)
        for index, (compact, masked) in enumerate(zip(outputs, masked_outputs, strict=True)):
            assert_close(compact, masked, f"output {index}")
        for key in tensors:
            assert_close(tensors[key], masked_tensors[key], key)
        with FlopCounterMode(display=False) as counter:
            resized.run(resized.take(params, subnet), subnet, x)
        assert int(counter.get_total_flops()) == 2 * len(x) * resized.macs(subnet)


@pytest.mark.parametrize("size", [(32, 32), (16, 16), (33, 17), (9, 40)])
@pytest.mark.parametrize("make", [resnet20, mobilenet_v2])
def test_the_full_network_costs_what_torch_counts(
    make: Callable[[], nn.Module], size: tuple[int, ...]
) -> None:
    module = make()
    net = elastic(module, torch.zeros(1, 3, 32, 32), check=False)
    with FlopCounterMode(display=False) as counter:
        module(torch.zeros(2, 3, *size))
    assert int(counter.get_total_flops()) == 2 * 2 * net.at(*size).macs(0.0)
    costs = make_count_costs(net.at(*size))
    assert costs is not None
    assert costs.macs(torch.tensor([net.sizes]).numpy())[0] == net.at(*size).macs(
        net.full, training=True
    )


def test_both_sizes_share_everything_but_costs() -> None:
    module, x = ZOO["projected_residual"]()
    net, params = elastic(module, x), get_params(module)
    resized = net.at(12, 5)
    assert resized.module is net.module
    assert resized.fingerprint == net.fingerprint
    assert resized.full is net.full
    assert [(s.layers, s.filters, s.feeds) for s in resized.sites] == [
        (s.layers, s.filters, s.feeds) for s in net.sites
    ]
    ours, theirs = (n.draw(0.5, rng_stream(0, "draw")) for n in (net, resized))
    assert all((a == b).all() for a, b in zip(ours.masks, theirs.masks, strict=True))
    subnet_params = net.take(params, theirs)
    for name, tensor in resized.take(params, ours).items():
        assert torch.equal(tensor, subnet_params[name])
    uniform_table(net).check_network(resized)
    assert resized.count_bytes(params, ours) == net.count_bytes(params, ours)


def test_its_own_size_is_the_network_itself() -> None:
    net = elastic(*ZOO["projected_residual"]())
    assert net.at(8, 8) is net
    assert net.at(12, 12).at(8, 8) is net
    assert net.at(12, 12).at(16, 12) is net.at(16, 12)
    assert net.at(12, 12) is net.at(12, 12)


def test_the_sizes_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic_module, "MAX_CACHED_SIZES", 2)
    net = elastic(*ZOO["projected_residual"]())
    small, medium = net.at(9, 9), net.at(10, 10)
    assert net.at(9, 9) is small
    net.at(11, 11)
    assert net.at(9, 9) is small
    assert net.at(10, 10) is not medium


def test_inputs_of_the_first_size_are_resized_together() -> None:
    class TwoViews(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(2, 4, 3), nn.Linear(6, 3)

        def forward(self, age: Tensor, left: Tensor, right: Tensor) -> Tensor:
            features = self.conv(torch.cat([left, right], 1)).mean((2, 3))
            out: Tensor = self.head(torch.cat([features, age], 1))
            return out

    module = TwoViews()
    net = elastic(module, (torch.zeros(1, 2), *[torch.zeros(1, 1, 8, 8)] * 2))
    inputs = torch.rand(3, 2), torch.rand(3, 1, 6, 9), torch.rand(3, 1, 6, 9)
    out = net.at(6, 9).run(get_params(module), net.full, *inputs)
    torch.testing.assert_close(out, module(*inputs))


class FixedView(nn.Module):
    """A view that puts four samples' worth of rows into the batch at twice the size."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(256, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.conv(x).view(-1, 256))
        return out


class SmallOnly(nn.Module):
    """A layer that only runs on small inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.extra = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        x = self.extra(x) if x.shape[2] < 8 else x
        return x.mean((2, 3))


def make_refusals() -> dict[str, tuple[nn.Module, tuple[int, ...], str]]:
    flat = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 2))
    return {
        "a flattened image": (
            flat, (12, 12), "2 cannot run at 12x12: the number of its 144 inputs depends on"
        ),
        "too small": (flat, (2, 8), "0 cannot run at 2x8: .*ernel size"),
        "a view of fixed size": (
            FixedView(), (16, 16), "FixedView cannot run at 16x16: its output has 4 rows per sample"
        ),
        "a layer that is not run": (
            SmallOnly(), (12, 12), "SmallOnly cannot run at 12x12: extra.weight is used at one of"
        ),
        "three numbers": (flat, (8, 8, 8), "Expected 2 positive sizes, .* 8x8, got 8x8x8"),
        "zero": (flat, (0, 8), "Expected 2 positive sizes, .* 8x8, got 0x8"),
    }  # fmt: skip


@pytest.mark.parametrize("case", make_refusals())
def test_a_network_that_cannot_run_there_says_which_layer_and_why(case: str) -> None:
    module, size, message = make_refusals()[case]
    net = elastic(module, torch.zeros(1, 3, 8, 8))
    for _ in range(2):  # a refusal leaves nothing behind
        with pytest.raises(ValueError, match=message) as caught:
            net.at(*size)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("shape", "advice"),
    [
        ((3, 12, 12), r"Expected inputs of 3x8x8, .* got 3x12x12: use net.at\(12, 12\)"),
        ((3, 8, 9), r"use net.at\(8, 9\) instead of net"),
        ((1, 8, 8), "pass an example of that shape to pliant.elastic"),
        ((3, 64), "got 3x64: pass an example of that shape"),
    ],
)
def test_another_size_than_the_traced_one_is_refused(shape: tuple[int, ...], advice: str) -> None:
    module, x = ZOO["projected_residual"]()
    net, params = elastic(module, x), get_params(module)
    with pytest.raises(ValueError, match=advice):
        net.run(params, net.full, torch.zeros(2, *shape, dtype=x.dtype))
    resized = net.at(12, 12)
    with pytest.raises(ValueError, match=r"Expected inputs of 3x12x12, .* net.at\(8, 8\)"):
        resized.run(params, net.full, x)


@pytest.mark.parametrize(("ours", "theirs", "clip"), OPTIMISERS)
def test_training_at_changing_sizes_equals_torch_on_resized_images(
    ours: Optimiser, theirs: Callable[[Any], torch.optim.Optimizer], clip: float
) -> None:
    module, x = ZOO["projected_residual"]()
    net = elastic(module, x)
    trainer, torch_optimiser = (
        SubnetTrainer(net, get_params(module), ours),
        theirs(module.parameters()),
    )
    module.train()
    for side in (8, 5, 5, 12, 8):
        images = F.interpolate(sample_input(x, (8, 8)), (side, side), mode="bilinear")
        trainer.switch(net.full, (side, side))
        trainer.step(images, lambda out: out.square().mean())
        torch_optimiser.zero_grad()
        module(images).square().mean().backward()
        if clip:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        torch_optimiser.step()
    for name, tensor in get_params(module).items():
        torch.testing.assert_close(trainer.params()[name], tensor, rtol=1e-12, atol=1e-12)


def test_a_trainer_may_change_subnet_and_size_in_any_order() -> None:
    module, x = ZOO["projected_residual"]()
    net = elastic(module, x)
    subnets = [net.draw(0.5, rng_stream(0, "draw", number)) for number in range(2)]
    plan = [(0, 8), (0, 12), (1, 12), (1, 8), (0, 5)]
    trainer = SubnetTrainer(net, get_params(module), OPTIMISERS[1][0])
    fresh_params = get_params(module)
    for number, side in plan:
        trainer.switch(subnets[number], (side, side))
        _, grads = trainer.compute_gradients(sample_input(x, (side, side)), torch.sum)
        fresh = SubnetTrainer(net.at(side, side), fresh_params, OPTIMISERS[1][0])
        fresh.switch(subnets[number])
        _, expected = fresh.compute_gradients(sample_input(x, (side, side)), torch.sum)
        assert all(map(torch.equal, grads, expected))
        fresh_params = fresh.params()


def test_a_copy_has_its_own_parameters_at_every_size() -> None:
    module, x = ZOO["projected_residual"]()
    net = elastic(module, x)
    net.at(12, 12)
    twin = copy.deepcopy(net)
    assert twin.at(12, 12).module is twin.module is not module
    assert twin.at(9, 9).fingerprint == net.fingerprint
