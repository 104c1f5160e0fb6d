"""Check the masked oracle against plain networks, numbers by hand, and expectations."""

from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.fx
import torch.nn.functional as F
from tests.nn.masked import masked_forward
from tests.nn.zoo import UNTRACEABLE, ZOO
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


def count_filters(net: nn.Module) -> dict[str, int]:
    """Map every layer that may be masked to its number of output channels."""
    kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
    layers = {
        path: module.weight.shape[0]
        for path, module in net.named_modules()
        if isinstance(module, kinds) and getattr(module, "groups", 1) == 1
    }
    parameters = {p: w.shape[0] for p, w in net.named_parameters() if "." not in p and w.ndim == 4}
    return layers | {path: size for path, size in parameters.items() if size > 1}


def draw_masks(
    net: nn.Module, seed: int, *, is_coupled: bool
) -> dict[str, tuple[int, Tensor, float]]:
    """Keep about half of each layer's channels; if coupled, layers of one size share a mask."""
    generator = torch.Generator().manual_seed(seed)
    layers, masks = {}, {}
    for index, (path, size) in enumerate(count_filters(net).items()):
        site = size if is_coupled else index
        if site not in masks:
            masks[site] = torch.rand(size, generator=generator) < 0.5
            masks[site][torch.randint(size, (1,), generator=generator)] = True
        layers[path] = (site, masks[site], 1.0 + 0.1 * site)
    return layers


def compute_loss(outputs: object) -> Tensor:
    outs = [out.flatten() for out in tree_leaves(outputs)]
    return sum((torch.arange(1.0, 1 + len(out)).sin() * out).sum() for out in outs)


def compute_gradients(net: nn.Module, outputs: object) -> list[Tensor]:
    return list(
        torch.autograd.grad(compute_loss(outputs), list(net.parameters()), materialize_grads=True)
    )


@pytest.mark.parametrize("name", ZOO)
def test_with_all_channels_it_equals_the_plain_network(name: str) -> None:
    net, x = ZOO[name]()
    plain_net, _ = ZOO[name]()
    layers = {
        path: (site, torch.ones(size, dtype=torch.bool), 1.0)
        for site, (path, size) in enumerate(count_filters(net).items())
    }
    assert layers
    plain, masked = plain_net(x), masked_forward(net, x, layers)
    torch.testing.assert_close(masked, plain, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(
        compute_gradients(net, masked), compute_gradients(plain_net, plain), rtol=1e-8, atol=1e-10
    )
    torch.testing.assert_close(dict(net.named_buffers()), dict(plain_net.named_buffers()))


@pytest.mark.parametrize("is_coupled", [False, True])
@pytest.mark.parametrize("name", ZOO)
def test_absent_filters_have_no_effect_and_no_gradient(name: str, is_coupled: bool) -> None:
    net, x = ZOO[name]()
    layers = draw_masks(net, seed=1, is_coupled=is_coupled)
    before = masked_forward(net, x, layers)
    grads = dict(
        zip((n for n, _ in net.named_parameters()), compute_gradients(net, before), strict=True)
    )
    with torch.no_grad():
        for path, (_, mask, _) in layers.items():
            for parameter in (f"{path}.weight", f"{path}.bias", path, f"{path}_bias"):
                if parameter in grads:
                    assert not grads[parameter][~mask].any()
                    net.get_parameter(parameter)[~mask] = 7.0
    after = masked_forward(net, x, layers)
    torch.testing.assert_close(after, before)
    assert all(out.isfinite().all() for out in tree_leaves(after))
    torch.testing.assert_close(compute_gradients(net, after), list(grads.values()))


class TinyNet(nn.Module):
    """Named 1x1 convolutions of one input channel, and a function of their outputs."""

    def __init__(
        self, weights_by_layer: dict[str, list[float]], body: Callable[..., Tensor]
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        for name, weights in weights_by_layer.items():
            self.layers[name] = nn.Conv2d(1, len(weights), 1, bias=False)
            self.layers[name].weight = nn.Parameter(torch.tensor(weights).view(-1, 1, 1, 1))
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(*(layer(x) for layer in self.layers.values()))


def run_tiny(
    body: Callable[..., Tensor], *layers: tuple[list[float], int, list[int], float]
) -> list[float]:
    """Return each channel of the body's result for an input of a single 1."""
    names = [f"layer{index}" for index in range(len(layers))]
    net = TinyNet({n: weights for n, (weights, _, _, _) in zip(names, layers, strict=True)}, body)
    masks = {
        f"layers.{name}": (site, torch.tensor(mask, dtype=torch.bool), scale)
        for name, (_, site, mask, scale) in zip(names, layers, strict=True)
    }
    values: list[float] = masked_forward(net, torch.ones(1, 1, 1, 1), masks).flatten().tolist()
    return values


def test_two_filters_and_a_linear_layer_by_hand() -> None:
    conv, linear = nn.Conv2d(1, 2, 1), nn.Linear(2, 1)
    net = nn.Sequential(conv, nn.Flatten(), linear)
    conv.weight = nn.Parameter(torch.tensor([2.0, 3.0]).view(2, 1, 1, 1))
    conv.bias = nn.Parameter(torch.tensor([1.0, 1.0]))
    linear.weight = nn.Parameter(torch.tensor([[5.0, 7.0]]))
    linear.bias = nn.Parameter(torch.tensor([1.0]))
    out = masked_forward(net, torch.ones(1, 1, 1, 1), {"0": (0, torch.tensor([True, False]), 2.0)})
    assert out.item() == (2 + 1) * 2 * 5 + 1
    out.backward()
    assert linear.weight.grad.tolist() == [[6.0, 0.0]]
    assert conv.weight.grad.flatten().tolist() == [10.0, 0.0]
    assert conv.bias.grad.tolist() == [10.0, 0.0]


def test_a_norm_bias_does_not_leak_through_an_absent_channel() -> None:
    norm = nn.BatchNorm1d(2, momentum=0.5)
    nn.init.constant_(norm.bias, 10.0)
    net = nn.Sequential(nn.Linear(1, 2, bias=False), norm, nn.ReLU())
    nn.init.ones_(net[0].weight)
    x = torch.tensor([[1.0], [3.0]])
    out = masked_forward(net, x, {"0": (0, torch.tensor([True, False]), 2.0)})
    torch.testing.assert_close(out, torch.tensor([[18.0, 0.0], [22.0, 0.0]]), atol=1e-3, rtol=0)
    # the mean of the unscaled values; the absent channel's is unchanged
    assert norm.running_mean.tolist() == [1.0, 0.0]
    assert norm.running_var.tolist() == [1.5, 1.0]


def test_a_mask_is_applied_once() -> None:
    layer, swish = ([2.0, 5.0], 0, [1, 0], 3.0), 2 * torch.sigmoid(torch.tensor(2.0)).item()
    assert run_tiny(lambda a: a * torch.sigmoid(a), layer) == pytest.approx([3 * swish, 0])
    assert run_tiny(lambda a: a + a + a, layer) == pytest.approx([18, 0])
    assert run_tiny(lambda a: a / (a + 2), layer) == pytest.approx([1.5, 0])
    assert run_tiny(lambda a: 1 - a**2, layer) == pytest.approx([-9, 0])
    assert run_tiny(lambda a: torch.log(a - 1) + 1, layer) == pytest.approx([3, 0])


def test_layers_of_one_site_share_one_mask() -> None:
    left, right = ([1.0, 2.0], 0, [1, 0], 2.0), ([3.0, 4.0], 0, [1, 0], 2.0)
    # squares show whether the factor was still pending: 2 * (1 + 3)^2, not (2 * 1 + 2 * 3)^2
    assert run_tiny(lambda a, b: (a + b) ** 2, left, right) == pytest.approx([32, 0])
    assert run_tiny(lambda a, b: a * b, left, right) == pytest.approx([6, 0])


def test_a_sum_keeps_the_union_even_of_equal_masks() -> None:
    left, right = ([1.0, 2.0, 3.0], 0, [1, 0, 0], 2.0), ([10.0, 20.0, 30.0], 1, [1, 1, 0], 5.0)
    assert run_tiny(lambda a, b: a + b, left, right) == pytest.approx([52, 100, 0])
    assert run_tiny(lambda a, b: (a - b) + 1, left, right) == pytest.approx([-47, -99, 0])
    equal_mask = ([10.0, 20.0, 30.0], 1, [1, 0, 0], 2.0)
    assert run_tiny(lambda a, b: (a + b) ** 2, left, equal_mask) == pytest.approx([22**2, 0, 0])


def test_a_product_keeps_the_intersection_and_both_factors() -> None:
    left, right = ([1.0, 2.0, 3.0], 0, [1, 1, 0], 2.0), ([4.0, 5.0, 6.0], 1, [1, 0, 1], 5.0)
    assert run_tiny(lambda a, b: (a * b) ** 2, left, right) == pytest.approx([16 * 10, 0, 0])


def test_a_dense_value_makes_a_sum_dense_but_not_a_product() -> None:
    masked = ([1.0, 2.0], 0, [1, 0], 3.0)
    dense = ([5.0, 7.0], 1, [1, 1], 1.0)

    def add(a: Tensor, b: Tensor) -> Tensor:
        return (a + torch.cumsum(b, 1)) ** 2

    assert run_tiny(add, masked, dense) == pytest.approx([64, 144])
    assert run_tiny(lambda a, b: (a * torch.cumsum(b, 1)) ** 2, masked, dense) == pytest.approx(
        [75, 0]
    )


def test_concatenations_and_slices_keep_the_mask_of_each_channel() -> None:
    left, right = ([1.0, 2.0], 0, [1, 0], 2.0), ([3.0, 4.0], 1, [0, 1], 5.0)
    assert run_tiny(lambda a, b: torch.cat([a, b], 1) ** 2, left, right) == [2, 0, 0, 80]
    assert run_tiny(lambda a, b: torch.cat([a, b], 1)[:, 1:4:2] ** 2, left, right) == [0, 80]
    assert run_tiny(lambda a, b: torch.cat([a, b], 1).chunk(2, 1)[1] ** 2, left, right) == [0, 80]
    # channels 0 and 1 of one site have different masks
    assert run_tiny(lambda a: (a[:, :1] + a[:, 1:]) ** 2, left) == [4]


def test_a_parameter_is_masked_and_an_unknown_operation_is_dense() -> None:
    layer, shift = ([1.0, 2.0], 0, [0, 1], 2.0), torch.tensor([10.0, 20.0]).view(2, 1, 1)
    assert run_tiny(lambda a: a + shift, layer) == [0, 44]
    assert run_tiny(lambda a: torch.cumsum(a + shift, 1) + shift, layer) == [10, 64]


def test_norms_that_mix_channels_use_the_present_ones() -> None:
    weights, bias = [1.0, 3.0, 9.0, 4.0, 9.0, 9.0], torch.full((6,), 0.5)
    layer = (weights, 0, [1, 1, 0, 1, 0, 0], 2.0)
    # 1 and 3 become -1 and 1; 4 is alone and becomes 0
    grouped = run_tiny(lambda a: F.group_norm(a, 2, bias=bias), layer)
    assert grouped == pytest.approx([2 * -0.5, 2 * 1.5, 0, 2 * 0.5, 0, 0], abs=1e-4)
    # 1, 3, 5 have the mean 3 and the variance 8/3
    layer = ([1.0, 3.0, 9.0, 5.0], 0, [1, 1, 0, 1], 2.0)
    layered = run_tiny(lambda a: F.layer_norm(a, [4, 1, 1]), layer)
    assert layered == pytest.approx([-2 * 1.5**0.5, 0, 0, 2 * 1.5**0.5], abs=1e-4)
    # windows are those of the full network: 4 has an absent neighbour and divides by (1 + 16 / 2)
    layer = ([2.0, 9.0, 4.0], 0, [1, 0, 1], 2.0)
    local = run_tiny(lambda a: F.local_response_norm(a, 2, alpha=1.0, beta=1.0), layer)
    assert local == pytest.approx([2 * 2 / 3, 0, 2 * 4 / 9])


def test_channels_are_tracked_through_reshapes() -> None:
    layer = ([2.0, 3.0], 0, [0, 1], 2.0)
    assert run_tiny(lambda a: a.expand(1, 2, 1, 3).flatten(1) ** 2, layer) == [0, 0, 0, 18, 18, 18]
    assert run_tiny(lambda a: (a.permute(0, 2, 3, 1).mean((1, 2)) + 1) ** 2, layer) == [0, 32]
    assert run_tiny(lambda a: (a[:, None, :, 0].transpose(1, 2) + 1) ** 2, layer) == [0, 32]
    assert run_tiny(lambda a: a.view(1, 1, 2) ** 2, layer) == [0, 18]
    # one row of the result holds both channels, so factors are applied before the square
    mixed = run_tiny(lambda a: a.expand(1, 2, 1, 3).reshape(1, 3, 2) ** 2, layer)
    assert mixed == [0, 0, 0, 36, 36, 36]


def test_an_absent_channel_leaves_gradients_finite() -> None:
    top = torch.ones(2, 1, 1, requires_grad=True)
    net = TinyNet({"a": [4.0, 9.0]}, lambda a: torch.sqrt(a) + torch.log(a) + top / a)
    layers = {"layers.a": (0, torch.tensor([True, False]), 2.0)}
    masked_forward(net, torch.ones(1, 1, 1, 1), layers).sum().backward()
    slope = 2 * (1 / 4 + 1 / 4 - 1 / 16)  # of the root, the logarithm and the inverse at 4
    assert net.layers["a"].weight.grad.flatten().tolist() == pytest.approx([slope, 0])
    assert top.grad.flatten().tolist() == [2 / 4, 0]


def test_a_depthwise_bias_is_scaled_too() -> None:
    weight, bias = torch.ones(4, 1, 1, 1), torch.tensor([1.0, 2.0, 3.0, 4.0])
    layer = ([1.0, 2.0], 0, [0, 1], 2.0)
    out = run_tiny(lambda a: F.conv2d(a, weight, bias, groups=2) ** 2, layer)
    assert out == pytest.approx([0, 0, 50, 72])


def test_a_gate_of_one_channel_broadcasts() -> None:
    layer, gate = ([1.0, 2.0], 0, [1, 0], 2.0), ([3.0], 1, [1], 4.0)
    assert run_tiny(lambda a, g: (a * g) ** 2, layer, gate) == pytest.approx([9 * 8, 0])


WEIGHT = torch.tensor([[1.0, -2.0]], dtype=torch.float64)
# factors are applied linearly in all of these
BODIES: dict[str, Callable[..., Tensor]] = {
    "activation": lambda a, b: torch.cat([torch.tanh(a), F.softplus(b)], 1).sum(1),
    "swish": lambda a, b: (a * torch.sigmoid(a)).cumsum(1) * b,
    "sum": lambda a, b: F.silu(a) - b.exp(),
    "product": lambda a, b: torch.relu(torch.tanh(a) * b + 1),
    "gate": lambda a, b: a * torch.sigmoid(b).mean((2, 3), keepdim=True),
    "slices": lambda a, b: a[:, 1:].sigmoid() + b.narrow(1, 0, 1),
    "features": lambda a, b: F.linear(F.elu(a).flatten(1), WEIGHT) + b.view(1, 2).relu(),
}


@pytest.mark.parametrize("name", BODIES)
def test_the_mean_over_all_masks_is_the_plain_network(name: str) -> None:
    weights, keep = ([0.7, -1.2], [1.5, 0.4]), (0.5, 0.25)
    net = TinyNet({"a": weights[0], "b": weights[1]}, BODIES[name]).double()
    x = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    mean = torch.zeros_like(net(x))
    for bits in product([True, False], repeat=4):
        masks = (torch.tensor(bits[:2]), torch.tensor(bits[2:]))
        probability = 1.0
        for q, mask in zip(keep, masks, strict=True):
            probability *= q ** int(mask.sum()) * (1 - q) ** int((~mask).sum())
        layers = {
            f"layers.{path}": (site, mask, 1 / q)
            for site, (path, mask, q) in enumerate(zip("ab", masks, keep, strict=True))
        }
        mean += probability * masked_forward(net, x, layers).detach()
    torch.testing.assert_close(mean, net(x).detach())


def test_a_wrong_layer_or_mask_is_refused() -> None:
    net, x = ZOO["grouped"]()
    with pytest.raises(LookupError, match="'nothing'"):
        masked_forward(net, x, {"nothing": (0, torch.ones(4, dtype=torch.bool), 1.0)})
    with pytest.raises(ValueError, match="over 6 output channels of reduce"):
        masked_forward(net, x, {"reduce.0": (0, torch.ones(4, dtype=torch.bool), 1.0)})


@pytest.mark.parametrize("name", UNTRACEABLE)
def test_untraceable_networks_run_but_cannot_be_traced(name: str) -> None:
    net, x = UNTRACEABLE[name]()
    assert net(x).shape == (4, 3)
    with pytest.raises((torch.fx.proxy.TraceError, TypeError)):
        torch.fx.symbolic_trace(net)
