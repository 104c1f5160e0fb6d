"""Tracing networks as people write them, and clear errors for those that cannot be traced."""

import inspect
import math
import re
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.nn.compare_masked import assert_compact_equals_masked
from tests.nn.zoo import UNTRACEABLE, ZOO
from torch import Tensor, nn

from pliant.nn import models
from pliant.nn.compiler.trace import NotTraceable, trace
from pliant.nn.elastic import Elastic, elastic
from pliant.params import get_params
from pliant.rng import rng_stream


class Framed(nn.Module):
    """A stem of six channels, the operation under test, and a linear head."""

    def __init__(self, middle: Callable[["Framed", Tensor], Tensor], width: int = 6) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 6, 3, padding=1), nn.Linear(width, 3)
        self.body = nn.Conv2d(6, 6, 1)
        self.pool, self.unpool = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)
        self.lstm = nn.LSTM(6, 5, batch_first=True)
        self.register_buffer("blur", torch.full((6, 1, 3, 3), 1 / 9), persistent=False)
        self.register_buffer("shift", torch.linspace(0, 1, 6).view(6, 1, 1))
        self.constant = torch.linspace(1, 2, 6).view(1, 6, 1, 1).double()
        self._middle = middle

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self._middle(self, self.stem(x)).mean((2, 3)))


def add_if_shapes_match(net: Framed, x: Tensor) -> Tensor:
    y = net.body(x)
    assert y.size(0) == x.size(0)
    return x + y if y.shape == x.shape else y


def gate_without_gradient(net: Framed, x: Tensor) -> Tensor:
    with torch.no_grad():
        gate = torch.sigmoid(net.body(x))
    return x * gate + net.body(x).detach()


def pad_with_zeros(net: Framed, x: Tensor) -> Tensor:
    zeros = torch.zeros(x.size(0), 2, *x.shape[2:], dtype=x.dtype, device=x.device)
    return torch.cat([net.body(x), zeros], 1)


def swap_halves(net: Framed, x: Tensor) -> Tensor:
    first, last = torch.chunk(net.body(x), 2, dim=1)[::-1]
    return torch.cat([first, last], 1)


def transpose_batch(net: Framed, x: Tensor) -> Tensor:
    y = x.transpose(0, 1).flatten(1)  # channels, batch and pixels
    return y.reshape(6, x.shape[0], 8, 8).transpose(0, 1)


def run_lstm(net: Framed, x: Tensor) -> Tensor:
    return net.lstm(x.flatten(2).transpose(1, 2))[0].transpose(1, 2).unsqueeze(3)


def use_sizes(net: Framed, x: Tensor) -> Tensor:
    batch, channels, height, width = x.shape
    half = int(channels * 0.5)
    y = x.view(batch, channels, math.prod(x.shape[2:]))
    y = y.reshape(-1, channels, height, width) * (x.numel() / x.numel())
    return torch.cat([y[:, :half], x[:, half:] / math.sqrt(x.dim())], 1)


MIDDLES: dict[str, tuple[Callable[[Framed, Tensor], Tensor], int]] = {
    "a comparison of shapes": (add_if_shapes_match, 6),
    "arithmetic with sizes": (use_sizes, 6),
    "a part without gradient": (gate_without_gradient, 6),
    "a buffer that is not saved": (lambda net, x: F.conv2d(x, net.blur, groups=6), 6),
    "a buffer that is saved": (lambda net, x: torch.tanh(x + net.shift), 6),
    "a tensor attribute": (lambda net, x: torch.tanh(x * net.constant), 6),
    "zeros with the batch size": (pad_with_zeros, 8),
    "all parts of a split": (lambda net, x: torch.cat(x.chunk(2, 1), 1), 6),
    "parts in another order": (swap_halves, 6),
    "a range from the end": (lambda net, x: x.narrow(1, -2, 2), 2),
    "indices of the maxima": (lambda net, x: net.unpool(*net.pool(net.body(x))), 6),
    "the batch on another axis": (transpose_batch, 6),
    "a mean of everything": (lambda net, x: net.body(x) + x.mean(dim=()), 6),
    "a recurrent layer": (run_lstm, 5),
}


@pytest.mark.parametrize("coupled", [True, False])
@pytest.mark.parametrize("case", MIDDLES)
def test_compact_equals_masked_for_ordinary_code(case: str, coupled: bool) -> None:
    torch.manual_seed(0)
    middle, width = MIDDLES[case]
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    assert_compact_equals_masked(Framed(middle, width).double(), x, coupled=coupled)


class Viewed(nn.Module):
    """Views of an input and of an output, whose memory format the pass may change."""

    def __init__(self) -> None:
        super().__init__()
        self.early, self.conv, self.last = nn.Linear(192, 2), nn.Conv2d(3, 6, 3), nn.Conv2d(6, 2, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.last(self.conv(x))
        return self.early(x.view(x.size(0), -1)), y.view(x.size(0), -1)


def test_a_view_does_not_depend_on_the_memory_format() -> None:
    assert_compact_equals_masked(
        Viewed().double(), torch.randn(2, 3, 8, 8, dtype=torch.float64), coupled=True
    )


@pytest.mark.parametrize("name", ["dense", "linear_squeeze_excite", "channel_shuffle", "tokens"])
def test_any_batch_size_works(name: str) -> None:
    module, x = ZOO[name]()
    net = elastic(module, x[:1])
    larger = torch.cat([x, x[:1]])
    small = net.take(get_params(module), net.full)
    expected = module(larger)
    torch.testing.assert_close(net.run(small, net.full, larger), expected, rtol=1e-9, atol=1e-9)


def test_sizes_other_than_the_batch_are_integers() -> None:
    class Pixels(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert x.shape[2:].numel() == 12
            assert len(x.shape) == x.ndim == 4
            return x.reshape(x.size(0), x.size(1), x[0, 0].numel()).sum(2)

    net = elastic(Pixels(), torch.zeros(1, 2, 3, 4))
    assert net.run({}, net.full, torch.ones(5, 2, 3, 4)).tolist() == [[12.0, 12.0]] * 5


class Options(nn.Module):
    """A forward pass with optional arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 6, 3), nn.Linear(6, 2)

    def forward(
        self, x: Tensor, weights: Tensor | None = None, *, features: bool = False
    ) -> Tensor:
        x = self.conv(x)
        if weights is not None:
            x = x * weights
        x = x.mean((2, 3))
        return x if features else self.head(x)


def test_arguments_outside_the_example_keep_their_defaults() -> None:
    module, x = Options(), torch.randn(4, 3, 5, 5)
    small = get_params(module)
    net = elastic(module, x)
    torch.testing.assert_close(net.run(small, net.full, x), module(x))
    weights = torch.rand(4, 1, 3, 3)
    both = elastic(module, (x, weights))
    torch.testing.assert_close(both.run(small, both.full, x, weights), module(x, weights))
    with pytest.raises(ValueError, match="Expected 2 inputs, got 1"):
        both.run(small, both.full, x)


def test_each_input_needs_an_example() -> None:
    x = torch.zeros(1, 3, 5, 5)
    with pytest.raises(ValueError, match="one example for each input of Options, got 3: too many"):
        elastic(Options(), (x, x, x))
    with pytest.raises(ValueError, match=r"Bilinear, got 1: missing a required argument: 'input2'"):
        elastic(nn.Bilinear(2, 3, 4), torch.zeros(1, 2))
    with pytest.raises(ValueError, match=r"batch dimension, like torch.zeros\(1, 3, 32, 32\)"):
        elastic(Options(), torch.zeros(3))


def test_tracing_keeps_the_mode_of_the_network() -> None:
    module, x = ZOO["dense"]()
    module.eval()
    module.norms[1].train()
    before = get_params(module)
    trace(module, x)
    assert [norm.training for norm in module.norms] == [False, True, False, False]
    assert all(torch.equal(before[name], tensor) for name, tensor in get_params(module).items())


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("branch_on_sum", "if x.sum() > 0:"),
        ("loop_on_maximum", "for _ in range(int(x.abs().max())):"),
        ("while_large", "while x.norm().item() > 1.0:"),
    ],
)
def test_the_error_for_data_dependent_control_flow_names_its_line(name: str, source: str) -> None:
    module, x = UNTRACEABLE[name]()
    lines, first = inspect.getsourcelines(type(module))
    line = first + next(offset for offset, text in enumerate(lines) if source in text)
    with pytest.raises(NotTraceable) as caught:
        elastic(module, x)
    message = str(caught.value)
    assert message.startswith(type(module).__name__)
    assert f"{inspect.getfile(type(module))}:{line}: `{source}`" in message
    assert "torch.where" in message
    assert "\n" not in message


def test_the_error_names_the_innermost_module() -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 3, 1), nn.Sequential(UNTRACEABLE["branch_on_sum"]()[0].float())
    )
    with pytest.raises(NotTraceable, match=r"^1\.0 cannot be traced: a branch on the value"):
        elastic(net, torch.zeros(1, 3, 8, 8))


def test_branching_on_the_batch_size_is_refused() -> None:
    class Small(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.size(0) == 1 else x + 1

    with pytest.raises(NotTraceable, match=r"test_trace.py:\d+: `return x if x.size\(0\) == 1"):
        elastic(Small(), torch.zeros(1, 3))


def test_the_error_for_a_wrong_shape_names_the_layer() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(99, 2))
    with pytest.raises(NotTraceable, match=r"^2 cannot be traced: .*\[batch, 144\].* the example"):
        elastic(net, torch.zeros(1, 3, 8, 8))


@pytest.fixture
def net() -> Elastic:
    return elastic(*ZOO["plain"]())


@pytest.mark.parametrize("rate", [1.0, -0.1, math.nan, math.inf, 1.5])
def test_a_rate_outside_its_range_is_refused(net: Elastic, rate: float) -> None:
    message = rf"Expected rates in \[0, 1\), got {re.escape(str(rate))} for site 1 \(features.3\)"
    for call in (
        net.macs,
        net.expand_rates,
        net.select_prefix,
        lambda rates: net.draw(rates, rng_stream(0)),
    ):
        with pytest.raises(ValueError, match=message):
            call([0.5, rate])
        with pytest.raises(ValueError, match=r"got .* for site 0"):
            call(rate)


@pytest.mark.parametrize("rates", [[0.5], [0.5] * 3, [], np.zeros((2, 2))])
def test_a_wrong_number_of_rates_is_refused(net: Elastic, rates: object) -> None:
    size = np.size(rates)
    with pytest.raises(ValueError, match=f"Expected 2 rates, one for each site, got {size}"):
        net.macs(rates)  # type: ignore[arg-type]


def test_a_subnet_of_another_network_is_refused(net: Elastic) -> None:
    module, x = ZOO["dense"]()
    other = elastic(module, x)
    message = (
        r"Expected a subnet of this network \(4 sites of 4, 3, 5, 3 filters\), "
        r"got one of another \(2 sites of 4, 5 filters\)"
    )
    params = get_params(module)
    for call in (
        other.macs,
        other.count_params,
        other.count_activations,
        other.bind,
        lambda subnet: other.take(params, subnet),
        lambda subnet: other.put(params, params, subnet),
        lambda subnet: other.run(params, subnet, x),
    ):
        with pytest.raises(ValueError, match=message):
            call(net.full)


def test_equal_networks_accept_each_others_subnets(net: Elastic) -> None:
    again = elastic(*ZOO["plain"]())
    assert again.fingerprint == net.fingerprint
    assert again.macs(net.select_prefix(0.5)) == net.macs(net.select_prefix(0.5))
    module, x = ZOO["projected_residual"]()
    uncoupled = elastic(module, x, coupled=False)
    assert uncoupled.fingerprint != elastic(module, x).fingerprint


def test_a_network_without_sites_has_one_subnet() -> None:
    net = elastic(nn.Linear(4, 2), torch.zeros(1, 4))
    assert net.sites == ()
    assert net.draw(0.5, rng_stream(0)).masks == ()
    assert net.macs(0.5) == net.macs(net.select_prefix(0.5)) == 8


def test_other_threads_may_run_and_trace_networks():
    def work(net, errors):
        x = torch.rand(2, 3, 32, 32)
        expected = net(x)
        try:
            while not is_over.is_set():
                assert torch.equal(net(x), expected)
                assert len(trace(net, x).nodes) == count
        except Exception as error:
            errors.append(error)

    nets = [models.lenet_small() for _ in range(2)]
    count = len(trace(nets[0], torch.rand(1, 3, 32, 32)).nodes)
    is_over, errors = threading.Event(), []
    threads = [threading.Thread(target=work, args=(net, errors)) for net in nets]
    for thread in threads:
        thread.start()
    try:
        for _ in range(10):
            trace(nets[0], torch.rand(1, 3, 32, 32))
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert errors == []
    assert nn.Module.__call__.__name__ == "_wrapped_call_impl"  # as torch left it
