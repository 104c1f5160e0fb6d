"""The masked reference is checked against plain networks, numbers on paper, and expectations."""

from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.fx
import torch.nn.functional as F
from masked import masked_forward
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from zoo import REFUSED, ZOO


def filters(net: nn.Module) -> dict[str, int]:
    """Return every layer that could be drawn, with its number of output channels."""
    kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
    found = {
        path: module.weight.shape[0]
        for path, module in net.named_modules()
        if isinstance(module, kinds) and getattr(module, "groups", 1) == 1
    }
    own = {p: w.shape[0] for p, w in net.named_parameters() if "." not in p and w.ndim == 4}
    return found | {path: size for path, size in own.items() if size > 1}


def drawn(net: nn.Module, seed: int, *, is_coupled: bool) -> dict[str, tuple[int, Tensor, float]]:
    """Draw half of each layer's channels; coupled layers are those of one size."""
    generator = torch.Generator().manual_seed(seed)
    layers, masks = {}, {}
    for number, (path, size) in enumerate(filters(net).items()):
        site = size if is_coupled else number
        if site not in masks:
            masks[site] = torch.rand(size, generator=generator) < 0.5
            masks[site][torch.randint(size, (1,), generator=generator)] = True
        layers[path] = (site, masks[site], 1.0 + 0.1 * site)
    return layers


def loss(outputs: object) -> Tensor:
    outs = [out.flatten() for out in tree_leaves(outputs)]
    return sum((torch.arange(1.0, 1 + len(out)).sin() * out).sum() for out in outs)


def gradients(net: nn.Module, outputs: object) -> list[Tensor]:
    return list(torch.autograd.grad(loss(outputs), list(net.parameters()), materialize_grads=True))


@pytest.mark.parametrize("name", ZOO)
def test_with_all_channels_it_is_the_plain_network(name: str) -> None:
    net, x = ZOO[name]()
    twin, _ = ZOO[name]()
    layers = {
        path: (site, torch.ones(size, dtype=torch.bool), 1.0)
        for site, (path, size) in enumerate(filters(net).items())
    }
    assert layers
    plain, masked = twin(x), masked_forward(net, x, layers)
    torch.testing.assert_close(masked, plain, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(
        gradients(net, masked), gradients(twin, plain), rtol=1e-8, atol=1e-10
    )
    torch.testing.assert_close(dict(net.named_buffers()), dict(twin.named_buffers()))


@pytest.mark.parametrize("is_coupled", [False, True])
@pytest.mark.parametrize("name", ZOO)
def test_absent_filters_change_nothing_and_learn_nothing(name: str, is_coupled: bool) -> None:
    net, x = ZOO[name]()
    layers = drawn(net, seed=1, is_coupled=is_coupled)
    before = masked_forward(net, x, layers)
    slopes = dict(zip((n for n, _ in net.named_parameters()), gradients(net, before), strict=True))
    with torch.no_grad():
        for path, (_, mask, _) in layers.items():
            for parameter in (f"{path}.weight", f"{path}.bias", path, f"{path}_bias"):
                if parameter in slopes:
                    assert not slopes[parameter][~mask].any()
                    net.get_parameter(parameter)[~mask] = 7.0
    after = masked_forward(net, x, layers)
    torch.testing.assert_close(after, before)
    assert all(out.isfinite().all() for out in tree_leaves(after))
    torch.testing.assert_close(gradients(net, after), list(slopes.values()))


class Hand(nn.Module):
    """Named 1x1 convolutions of one input channel, and a function of their outputs."""

    def __init__(self, filters: dict[str, list[float]], body: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        for name, weights in filters.items():
            self.layers[name] = nn.Conv2d(1, len(weights), 1, bias=False)
            self.layers[name].weight = nn.Parameter(torch.tensor(weights).view(-1, 1, 1, 1))
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(*(layer(x) for layer in self.layers.values()))


def by_hand(
    body: Callable[..., Tensor], *layers: tuple[list[float], int, list[int], float]
) -> list[float]:
    """Return what each channel of the body's outcome comes to when the input is a single 1."""
    names = [f"layer{number}" for number in range(len(layers))]
    net = Hand({n: weights for n, (weights, _, _, _) in zip(names, layers, strict=True)}, body)
    chosen = {
        f"layers.{name}": (site, torch.tensor(mask, dtype=torch.bool), scale)
        for name, (_, site, mask, scale) in zip(names, layers, strict=True)
    }
    outcome: list[float] = masked_forward(net, torch.ones(1, 1, 1, 1), chosen).flatten().tolist()
    return outcome


def test_two_filters_and_a_linear_layer_on_paper() -> None:
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
    # the mean is that of the unscaled values, the absent channel's is untouched
    assert norm.running_mean.tolist() == [1.0, 0.0]
    assert norm.running_var.tolist() == [1.5, 1.0]


def test_a_draw_counts_once() -> None:
    two, swish = ([2.0, 5.0], 0, [1, 0], 3.0), 2 * torch.sigmoid(torch.tensor(2.0)).item()
    assert by_hand(lambda a: a * torch.sigmoid(a), two) == pytest.approx([3 * swish, 0])
    assert by_hand(lambda a: a + a + a, two) == pytest.approx([18, 0])
    assert by_hand(lambda a: a / (a + 2), two) == pytest.approx([1.5, 0])
    assert by_hand(lambda a: 1 - a**2, two) == pytest.approx([-9, 0])
    assert by_hand(lambda a: torch.log(a - 1) + 1, two) == pytest.approx([3, 0])


def test_layers_of_one_site_are_one_draw() -> None:
    one, other = ([1.0, 2.0], 0, [1, 0], 2.0), ([3.0, 4.0], 0, [1, 0], 2.0)
    # squares show whether the factor was still pending: 2 * (1 + 3)^2, not (2 * 1 + 2 * 3)^2
    assert by_hand(lambda a, b: (a + b) ** 2, one, other) == pytest.approx([32, 0])
    assert by_hand(lambda a, b: a * b, one, other) == pytest.approx([6, 0])


def test_different_draws_unite_in_a_sum_even_where_masks_coincide() -> None:
    one, other = ([1.0, 2.0, 3.0], 0, [1, 0, 0], 2.0), ([10.0, 20.0, 30.0], 1, [1, 1, 0], 5.0)
    assert by_hand(lambda a, b: a + b, one, other) == pytest.approx([52, 100, 0])
    assert by_hand(lambda a, b: (a - b) + 1, one, other) == pytest.approx([-47, -99, 0])
    same = ([10.0, 20.0, 30.0], 1, [1, 0, 0], 2.0)
    assert by_hand(lambda a, b: (a + b) ** 2, one, same) == pytest.approx([22**2, 0, 0])


def test_different_draws_intersect_in_a_product_and_both_factors_are_owed() -> None:
    one, other = ([1.0, 2.0, 3.0], 0, [1, 1, 0], 2.0), ([4.0, 5.0, 6.0], 1, [1, 0, 1], 5.0)
    assert by_hand(lambda a, b: (a * b) ** 2, one, other) == pytest.approx([16 * 10, 0, 0])


def test_a_dense_value_fills_a_sum_and_leaves_a_product_alone() -> None:
    masked = ([1.0, 2.0], 0, [1, 0], 3.0)
    dense = ([5.0, 7.0], 1, [1, 1], 1.0)

    def summed(a: Tensor, b: Tensor) -> Tensor:
        return (a + torch.cumsum(b, 1)) ** 2

    assert by_hand(summed, masked, dense) == pytest.approx([64, 144])
    assert by_hand(lambda a, b: (a * torch.cumsum(b, 1)) ** 2, masked, dense) == pytest.approx(
        [75, 0]
    )


def test_joins_and_slices_keep_each_channels_own_draw() -> None:
    one, other = ([1.0, 2.0], 0, [1, 0], 2.0), ([3.0, 4.0], 1, [0, 1], 5.0)
    assert by_hand(lambda a, b: torch.cat([a, b], 1) ** 2, one, other) == [2, 0, 0, 80]
    assert by_hand(lambda a, b: torch.cat([a, b], 1)[:, 1:4:2] ** 2, one, other) == [0, 80]
    assert by_hand(lambda a, b: torch.cat([a, b], 1).chunk(2, 1)[1] ** 2, one, other) == [0, 80]
    # channels 0 and 1 of one site are different draws
    assert by_hand(lambda a: (a[:, :1] + a[:, 1:]) ** 2, one) == [4]


def test_a_parameter_acts_as_an_affine_and_an_unknown_operation_is_dense() -> None:
    one, shift = ([1.0, 2.0], 0, [0, 1], 2.0), torch.tensor([10.0, 20.0]).view(2, 1, 1)
    assert by_hand(lambda a: a + shift, one) == [0, 44]
    assert by_hand(lambda a: torch.cumsum(a + shift, 1) + shift, one) == [10, 64]


def test_norms_that_mix_channels_look_at_those_that_are_there() -> None:
    weights, bias = [1.0, 3.0, 9.0, 4.0, 9.0, 9.0], torch.full((6,), 0.5)
    layer = (weights, 0, [1, 1, 0, 1, 0, 0], 2.0)
    # 1 and 3 become -1 and 1; 4 is alone and becomes 0
    grouped = by_hand(lambda a: F.group_norm(a, 2, bias=bias), layer)
    assert grouped == pytest.approx([2 * -0.5, 2 * 1.5, 0, 2 * 0.5, 0, 0], abs=1e-4)
    # 1, 3, 5 have the mean 3 and the variance 8/3
    layer = ([1.0, 3.0, 9.0, 5.0], 0, [1, 1, 0, 1], 2.0)
    layered = by_hand(lambda a: F.layer_norm(a, [4, 1, 1]), layer)
    assert layered == pytest.approx([-2 * 1.5**0.5, 0, 0, 2 * 1.5**0.5], abs=1e-4)
    # windows stay at the original places: 4 has an absent neighbour and divides by (1 + 16 / 2)
    layer = ([2.0, 9.0, 4.0], 0, [1, 0, 1], 2.0)
    local = by_hand(lambda a: F.local_response_norm(a, 2, alpha=1.0, beta=1.0), layer)
    assert local == pytest.approx([2 * 2 / 3, 0, 2 * 4 / 9])


def test_channels_are_followed_through_changes_of_shape() -> None:
    layer = ([2.0, 3.0], 0, [0, 1], 2.0)
    assert by_hand(lambda a: a.expand(1, 2, 1, 3).flatten(1) ** 2, layer) == [0, 0, 0, 18, 18, 18]
    assert by_hand(lambda a: (a.permute(0, 2, 3, 1).mean((1, 2)) + 1) ** 2, layer) == [0, 32]
    assert by_hand(lambda a: (a[:, None, :, 0].transpose(1, 2) + 1) ** 2, layer) == [0, 32]
    # here each row of the outcome holds both channels, so that factors are paid before the square
    assert by_hand(lambda a: a.view(1, 1, 2) ** 2, layer) == [0, 36]


def test_an_absent_channel_spoils_no_gradient() -> None:
    top = torch.ones(2, 1, 1, requires_grad=True)
    net = Hand({"a": [4.0, 9.0]}, lambda a: torch.sqrt(a) + torch.log(a) + top / a)
    layers = {"layers.a": (0, torch.tensor([True, False]), 2.0)}
    masked_forward(net, torch.ones(1, 1, 1, 1), layers).sum().backward()
    slope = 2 * (1 / 4 + 1 / 4 - 1 / 16)  # of the root, the logarithm and the inverse at 4
    assert net.layers["a"].weight.grad.flatten().tolist() == pytest.approx([slope, 0])
    assert top.grad.flatten().tolist() == [2 / 4, 0]


def test_a_depthwise_bias_is_inside_what_is_scaled() -> None:
    weight, bias = torch.ones(4, 1, 1, 1), torch.tensor([1.0, 2.0, 3.0, 4.0])
    layer = ([1.0, 2.0], 0, [0, 1], 2.0)
    out = by_hand(lambda a: F.conv2d(a, weight, bias, groups=2) ** 2, layer)
    assert out == pytest.approx([0, 0, 50, 72])


def test_a_gate_of_one_channel_broadcasts() -> None:
    layer, gate = ([1.0, 2.0], 0, [1, 0], 2.0), ([3.0], 1, [1], 4.0)
    assert by_hand(lambda a, g: (a * g) ** 2, layer, gate) == pytest.approx([9 * 8, 0])


ROW = torch.tensor([[1.0, -2.0]], dtype=torch.float64)
BODIES: dict[str, Callable[..., Tensor]] = {
    "activation": lambda a, b: torch.cat([torch.tanh(a), F.softplus(b)], 1).sum(1),
    "swish": lambda a, b: (a * torch.sigmoid(a)).cumsum(1) * b,
    "sum": lambda a, b: F.silu(a) - b.exp(),
    "product": lambda a, b: torch.relu(torch.tanh(a) * b + 1),
    "gate": lambda a, b: a * torch.sigmoid(b).mean((2, 3), keepdim=True),
    "slices": lambda a, b: a[:, 1:].sigmoid() + b.narrow(1, 0, 1),
    "features": lambda a, b: F.linear(F.elu(a).flatten(1), ROW) + b.view(1, 2).relu(),
}


@pytest.mark.parametrize("name", BODIES)
def test_survivors_stand_for_the_absent(name: str) -> None:
    """The mean over all draws is the plain network, wherever factors are paid linearly."""
    weights, kept = ([0.7, -1.2], [1.5, 0.4]), (0.5, 0.25)
    net = Hand({"a": weights[0], "b": weights[1]}, BODIES[name]).double()
    x = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    mean = torch.zeros_like(net(x))
    for draw in product([True, False], repeat=4):
        masks = (torch.tensor(draw[:2]), torch.tensor(draw[2:]))
        chance = 1.0
        for q, mask in zip(kept, masks, strict=True):
            chance *= q ** int(mask.sum()) * (1 - q) ** int((~mask).sum())
        layers = {
            f"layers.{path}": (site, mask, 1 / q)
            for site, (path, mask, q) in enumerate(zip("ab", masks, kept, strict=True))
        }
        mean += chance * masked_forward(net, x, layers).detach()
    torch.testing.assert_close(mean, net(x).detach())


def test_a_wrong_layer_or_mask_is_refused() -> None:
    net, x = ZOO["grouped"]()
    with pytest.raises(LookupError, match="'nothing'"):
        masked_forward(net, x, {"nothing": (0, torch.ones(4, dtype=torch.bool), 1.0)})
    with pytest.raises(ValueError, match="over 6 output channels of reduce"):
        masked_forward(net, x, {"reduce.0": (0, torch.ones(4, dtype=torch.bool), 1.0)})
    with pytest.raises(ValueError, match="without groups, got one with 2"):
        masked_forward(net, x, {"grouped.0": (0, torch.ones(6, dtype=torch.bool), 1.0)})


@pytest.mark.parametrize("name", REFUSED)
def test_refused_networks_run_plainly_but_cannot_be_traced(name: str) -> None:
    net, x = REFUSED[name]()
    assert net(x).shape == (4, 3)
    with pytest.raises((torch.fx.proxy.TraceError, TypeError)):
        torch.fx.symbolic_trace(net)
