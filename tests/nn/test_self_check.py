"""An elastic network that differs from the plain one is an error that names the module."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.nn.support import Body
from tests.nn.zoo import ZOO
from torch import Tensor, fx, nn

from pliant.data import ImageDataset, TrainTestData
from pliant.data.partition import Iid
from pliant.engine.worker_context import build_context, build_worker_context
from pliant.methods import FedAvg
from pliant.nn import self_check
from pliant.nn.check_key import PASSED
from pliant.nn.compiler.preserve import preserve, switch_to_training
from pliant.nn.compiler.refusals import NotTraceable
from pliant.nn.compiler.trace import trace
from pliant.nn.elastic import Elastic, elastic
from pliant.nn.self_check import check_elastic
from pliant.nn.sites import ElasticOptions

EXAMPLE = torch.zeros(1, 3, 8, 8)
Change = Callable[[Any], Any]


def make_net() -> Elastic:
    torch.manual_seed(0)
    return elastic(
        Body(lambda net, x: net.norm(net.body(x))), EXAMPLE, check=False
    )  # with a program of its own


def break_instruction(net: Elastic, name: str, change: Change) -> None:
    """Change the result of one operation of the compact pass."""
    [instruction] = [item for item in net.program.instructions if item.name == name]
    run = instruction.run
    instruction.run = lambda env, bound: change(run(env, bound))


def check(net: Elastic) -> None:
    with preserve(net.module):
        switch_to_training(net.module)
        check_elastic(net, trace(net.module, EXAMPLE), (EXAMPLE,))


KEPT, DROPPED = "with all filters kept, the", "with half of the filters dropped, the"
BROKEN: dict[str, tuple[str, Change, str]] = {
    "another value": (
        "body",
        lambda x: x * torch.linspace(1, 2, 8).to(x),
        f"body is not traced as it runs: {KEPT} output 0 differs by",
    ),
    "another value of a function": (
        "relu",
        lambda x: x + x.square(),
        "body is not traced as it runs",
    ),
    "no gradient": (
        "body",
        lambda x: x.detach(),
        f"body is not traced as it runs: {KEPT} gradient of body.weight differs",
    ),
    "another value if narrow": (
        "last",
        lambda x: x if x.shape[1] == 5 else x * 2,
        f"last is not narrowed right: {DROPPED} output 0",
    ),
    "no gradient if narrow": (
        "stem",
        lambda x: x if x.shape[1] == 6 else x.detach(),
        f"stem is not narrowed right: {DROPPED} gradient of stem.bias",
    ),
}


@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize("case", BROKEN)
def test_the_error_names_the_first_module_that_differs(
    case: str, is_large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_check, "SMALL_MACS", 0 if is_large else 1e9)
    net, (name, change, message) = make_net(), BROKEN[case]
    check(net)
    break_instruction(net, name, change)
    with pytest.raises(NotTraceable) as caught:
        check(net)
    assert message in str(caught.value)
    assert str(caught.value).endswith("or skip this check with check=False")
    assert "\n" not in str(caught.value)


def test_statistics_that_are_not_updated_are_found() -> None:
    net = make_net()
    [norm] = [item for item in net.program.instructions if item.name == "norm"]
    run = norm.run

    def run_without_update(env: Any, bound: Any) -> Any:
        kept = {name: tensor.clone() for name, tensor in bound.params.items()}
        result = run(env, bound)
        bound.params["norm.running_mean"].data.copy_(kept["norm.running_mean"])
        return result

    norm.run = run_without_update
    with pytest.raises(NotTraceable, match=r"the buffer norm.running_mean differs by"):
        check(net)


@pytest.mark.parametrize("name", ZOO)
def test_large_networks_are_checked_in_their_own_precision(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_check, "SMALL_MACS", 0)
    monkeypatch.setattr(self_check, "LARGE_TOLERANCE", self_check.SINGLE_TOLERANCE)
    monkeypatch.setattr(self_check, "DOUBLE_TOLERANCE", -1.0)  # double precision is not needed
    PASSED.clear()
    module, x = ZOO[name]()
    elastic(module.float(), x.float())


class OwnPrecision(nn.Module):
    """A convolution with a constant in single precision, and random numbers of the input's type."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 6, 3), nn.Linear(4, 2)
        self.kernel = torch.randn(4, 6, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = F.conv2d(x * torch.rand(1, dtype=x.dtype), self.kernel)
        return self.head(x.mean((2, 3)))


def test_a_network_that_needs_its_own_precision_passes() -> None:
    assert len(elastic(OwnPrecision(), EXAMPLE).sites) == 1


def test_values_that_are_complex_or_not_finite_are_compared() -> None:
    net = elastic(Body(lambda net, x: torch.log(net.body(x) - 1)), EXAMPLE)  # NaN everywhere
    assert len(net.sites) == 3
    head = nn.Sequential(Body(), FourierTransform())
    assert len(elastic(head, EXAMPLE).sites) == 2


class FourierTransform(nn.Module):
    """A transform with complex results."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft(x)


def test_a_network_that_cannot_run_on_the_example_is_refused() -> None:
    def fail_on_real_tensors(net: Body, x: Tensor) -> Tensor:
        if not isinstance(x, fx.Proxy) and not x.is_meta:
            raise ValueError("no real tensors")
        return x

    with pytest.raises(NotTraceable, match=r"^Body fails on 2 samples .*: no real tensors$"):
        elastic(Body(fail_on_real_tensors), EXAMPLE)


CALLS = [0]


class Counting(nn.Module):
    """A network that counts its passes outside of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 4, 3), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        CALLS[0] += 1
        return self.head(self.conv(x).mean((2, 3)) * CALLS[0])


def test_workers_do_not_repeat_the_check() -> None:
    images = ImageDataset.from_tensors(torch.rand(8, 1, 8, 8), torch.arange(8) % 2)
    data = TrainTestData(images, images).share(Iid(), devices=2, proxy=2)
    with pytest.raises(NotTraceable, match=r"^Counting computes something else"):
        build_context(Counting(), data, FedAvg())
    context = build_worker_context(lambda: (Counting(), data), FedAvg(), ElasticOptions())
    assert len(context.net.sites) == 1
