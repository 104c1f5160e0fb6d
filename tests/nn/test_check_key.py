"""A process compiles and checks an architecture once, and again if what it depends on changes."""

import gc
import random
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn

from pliant.nn import check_key
from pliant.nn import elastic as elastic_module
from pliant.nn.check_key import CheckKey, make_check_key
from pliant.nn.compiler.refusals import NotTraceable
from pliant.nn.cut import split_network
from pliant.nn.elastic import elastic
from pliant.nn.models import densenet40, lenet, mobilenet_v2, resnet20, vgg11
from pliant.params import get_params

EXAMPLE, EXAMPLE_32 = torch.zeros(1, 3, 8, 8), torch.zeros(1, 3, 32, 32)
FACTOR, STEPS = 2.0, {"count": 0}
Middle = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def _forget_networks() -> Iterator[None]:
    check_key.PASSED.clear()
    yield
    check_key.PASSED.clear()


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """List the networks that are checked from here on."""
    names: list[str] = []
    check = elastic_module.check_elastic

    def check_and_count(net: Any, *args: Any) -> bool:
        names.append(type(net.module).__name__)
        return check(net, *args)

    monkeypatch.setattr(elastic_module, "check_elastic", check_and_count)
    return names


class Net(nn.Module):
    """Two convolutions with something between them."""

    def __init__(self, middle: Any = torch.relu, **attributes: Any) -> None:
        super().__init__()
        self.stem, self.norm, self.last = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3)
        self.middle = middle
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.norm(self.stem(x))))


def make_key(net: nn.Module, *inputs: Tensor, **options: bool) -> CheckKey | None:
    return make_check_key(net, inputs or (EXAMPLE,), **{"coupled": True, "hidden": False} | options)


def test_the_same_architecture_is_checked_once(checks: list[str]) -> None:
    first, second = elastic(Net(), EXAMPLE), elastic(Net().eval(), EXAMPLE)  # with other weights
    assert checks == ["Net"]
    assert first.fingerprint == second.fingerprint
    elastic(Net(), torch.rand(1, 3, 8, 8))
    assert checks == ["Net", "Net"]


def test_networks_of_the_same_architecture_share_a_program_but_no_weights() -> None:
    nets = [Net(), Net()]
    first, second = (elastic(net, EXAMPLE) for net in nets)
    assert first.program is second.program
    x = torch.rand(2, 3, 8, 8)
    for net, flexible in zip(nets, (first, second), strict=True):
        output = flexible.run(get_params(net), flexible.full, x)
        torch.testing.assert_close(output, net(x))


def test_a_shared_program_does_not_keep_its_network() -> None:
    net = Net()
    elastic(net, EXAMPLE)
    assert check_key.PASSED
    reference = weakref.ref(net)
    del net
    gc.collect()
    assert reference() is None


def test_constants_of_another_network_are_not_read() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.factor = nn.Conv2d(3, 4, 3), torch.full((), 2.0)

        def forward(self, x: Tensor) -> Tensor:
            return self.stem(x).mean((2, 3)) * self.factor

    first, second = Scaled(), Scaled()
    elastic(first, EXAMPLE)
    flexible = elastic(second, EXAMPLE)
    first.factor.fill_(5.0)
    x = torch.rand(2, 3, 8, 8)
    torch.testing.assert_close(flexible.run(get_params(second), flexible.full, x), second(x))


@pytest.mark.parametrize("make", [densenet40, lenet, mobilenet_v2, resnet20, vgg11])
def test_bundled_networks_have_a_key(make: Callable[[], nn.Module]) -> None:
    key = make_key(make())
    assert key is not None
    assert key == make_key(make())


def test_parts_of_a_network_have_a_key_that_depends_on_the_cut() -> None:
    parts = [split_network(lenet(), EXAMPLE_32, after) for after in ("stage1", "stage1", "stage2")]
    keys = [make_key(part.device, EXAMPLE_32) for part in parts]
    assert keys[0] is not None
    assert keys[0] == keys[1] != keys[2]
    assert make_key(parts[0].server) == make_key(parts[1].server) != make_key(parts[2].server)


def test_a_graph_that_is_changed_has_another_key() -> None:
    net = fx.symbolic_trace(Net())
    before = make_key(net)
    [middle] = net.graph.find_nodes(op="call_function", target=torch.relu)
    middle.target = torch.sigmoid
    net.recompile()
    assert before is not None
    assert make_key(net) != before


class WrongIfLoud(nn.Module):
    """A network that is traced as it runs only as long as it is not loud."""

    def __init__(self, loud: bool) -> None:
        super().__init__()
        self.body, self.head, self.loud = nn.Conv2d(3, 4, 3), nn.Linear(4, 2), loud

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        if self.loud and not isinstance(x, fx.Proxy):
            x = x * 2
        return self.head(x.mean((2, 3)))


def test_a_wrong_network_is_refused_after_a_right_one_of_its_class() -> None:
    net = WrongIfLoud(loud=False)
    elastic(net, EXAMPLE)
    net.loud = True
    with pytest.raises(NotTraceable, match="not traced as it runs"):
        elastic(net, EXAMPLE)
    with pytest.raises(NotTraceable, match="not traced as it runs"):  # a failure is not remembered
        elastic(net, EXAMPLE)


def scale(x: Tensor) -> Tensor:
    return x * FACTOR


def scale_by_helper(x: Tensor, times: int = 1) -> Tensor:
    return scale(x) * times


def count_outside(x: Tensor) -> Tensor:
    return x * STEPS["count"]


def scale_by(factor: float) -> Middle:
    return lambda x: x * factor


class Scale(nn.Module):
    """Multiply by a number of the class."""

    factor = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def set_global(name: str, value: Any) -> Callable[[Any, pytest.MonkeyPatch], None]:
    return lambda net, patch: patch.setitem(globals(), name, value)


def set_on_net(path: str, name: str, value: Any) -> Callable[[Any, pytest.MonkeyPatch], None]:
    return lambda net, patch: setattr(net.get_submodule(path), name, value)


CHANGES: dict[str, tuple[Any, Callable[[Any, pytest.MonkeyPatch], Any]]] = {
    "an attribute": (torch.relu, set_on_net("", "mode", "loud")),
    "an item of an attribute": (torch.relu, lambda net, patch: net.items.append(1)),
    "a number's type": (torch.relu, set_on_net("", "number", 1.0)),
    "an attribute of a layer": (torch.relu, set_on_net("stem", "padding", (1, 1))),
    "another function": (torch.relu, set_on_net("", "middle", torch.tanh)),
    "another layer": (torch.relu, set_on_net("", "norm", nn.InstanceNorm2d(4))),
    "a forward pass of its own": (torch.relu, set_on_net("", "forward", torch.relu)),
    "a mode": (torch.relu, lambda net, patch: net.norm.eval()),
    "a width": (torch.relu, set_on_net("", "last", nn.Conv2d(4, 3, 3))),
    "a dtype": (torch.relu, lambda net, patch: net.double()),
    "a memory format": (torch.relu, lambda net, patch: net.to(memory_format=torch.channels_last)),
    "a frozen weight": (torch.relu, lambda net, patch: net.stem.weight.requires_grad_(False)),
    "a tied weight": (torch.relu, lambda net, patch: setattr(net.norm, "bias", net.norm.weight)),
    "zero weights": (torch.relu, lambda net, patch: nn.init.zeros_(net.stem.weight)),
    "a buffer's value": (torch.relu, lambda net, patch: net.norm.running_mean.fill_(0.5)),
    "a constant's value": (torch.relu, lambda net, patch: net.table.fill_(2)),
    "a hook": (torch.relu, lambda net, patch: net.stem.register_forward_hook(lambda *_: None)),
    "a default": (
        scale_by_helper,
        lambda net, patch: patch.setattr(scale_by_helper, "__defaults__", (2,)),
    ),
    "a global": (scale, set_global("FACTOR", 3.0)),
    "a global of a helper": (scale_by_helper, set_global("FACTOR", 3.0)),
    "a helper": (scale_by_helper, set_global("scale", torch.relu)),
    "a counter": (count_outside, lambda net, patch: patch.setitem(STEPS, "count", 1)),
    "a closure": (scale_by(2.0), set_on_net("", "middle", scale_by(3.0))),
    "a lambda": (lambda x: x * 2, set_on_net("", "middle", lambda x: x * 3)),
    "an attribute of a class": (Scale(), lambda net, patch: patch.setattr(Scale, "factor", 3.0)),
    "a method of a class": (
        Scale(),
        lambda net, patch: patch.setattr(Scale, "forward", lambda self, x: x),
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_makes_another_key(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    middle, change = CHANGES[name]
    net = Net(middle, mode="quiet", items=[], number=1, table=torch.arange(3))
    key = make_key(net)
    assert key is not None
    assert make_key(net) == key
    change(net, monkeypatch)
    assert make_key(net) not in (key, None)


def test_the_example_and_the_options_are_part_of_the_key() -> None:
    net = Net()
    keys = [
        make_key(net),
        make_key(net, coupled=False),
        make_key(net, hidden=True),
        make_key(net, torch.zeros(1, 3, 9, 9)),
        make_key(net, torch.zeros(2, 3, 8, 8)),
        make_key(net, EXAMPLE.double()),
        make_key(net, EXAMPLE, EXAMPLE),
        make_key(net, torch.zeros(1, 3, dtype=torch.int64)),
        make_key(net, torch.ones(1, 3, dtype=torch.int64)),
    ]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        keys.append(make_key(net))
    assert None not in keys
    assert len(set(keys)) == len(keys)
    assert make_key(net, torch.rand(1, 3, 8, 8)) == make_key(net, torch.rand(1, 3, 8, 8))


def read_file(x: Tensor) -> Tensor:
    with open("factor") as file:
        return x * float(file.read())


def import_inside(x: Tensor) -> Tensor:
    import random as numbers

    return x * numbers.random()


class MyList(list[int]):
    """A list with a class of its own."""


UNKNOWN: dict[str, Any] = {
    "a package that may change": lambda x: x * random.random(),
    "a clock": lambda x: x * time.time(),
    "a function of a clock": time.time,
    "a numpy function": lambda x: x * float(np.sqrt(2)),
    "a file": read_file,
    "an import": import_inside,
    "a generator": torch.Generator(),
    "a numpy array": np.zeros(3),
    "a list with a class of its own": MyList([1]),
    "an iterator": iter([1]),
    "a method of a list": [1].pop,
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_understood_has_no_key(name: str) -> None:
    assert make_key(Net(UNKNOWN[name])) is None


def test_a_network_that_is_not_understood_is_checked_every_time(checks: list[str]) -> None:
    for _ in range(2):
        elastic(Net(lambda x: x * float(np.sqrt(2))), EXAMPLE)
    assert checks == ["Net", "Net"]


def test_a_check_that_compares_only_a_part_is_not_remembered(checks: list[str]) -> None:
    for _ in range(2):
        elastic(Net(lambda x: torch.log(torch.tanh(x) - 2)), EXAMPLE)  # NaN: no subnet is compared
    assert checks == ["Net", "Net"]


def test_the_architectures_not_used_for_longest_are_forgotten(
    checks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_key, "MAX_PASSED", 2)
    for number in (0, 1, 0, 2, 0, 1):
        elastic(Net(number=number), EXAMPLE)
    assert len(checks) == 4  # 0 is used all the time; 1 was the oldest when 2 came
