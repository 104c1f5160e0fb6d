"""Networks as people write them train like the plain network, or are refused in one line."""

import importlib.util
import io
import random
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.nn.compare_masked import assert_close, weighted_sum
from tests.nn.support import Body, Case
from tests.nn.support_cases import CASES
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pliant.nn.compiler.refusals import NotTraceable
from pliant.nn.elastic import elastic
from pliant.params import get_params

ROOT = Path(__file__).parents[2]
EXAMPLE = torch.zeros(1, 3, 8, 8)


def make(case: Case) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return case.make()


def select(*outcomes: str) -> Any:
    cases = [case for case in CASES if case.outcome in outcomes]
    return pytest.mark.parametrize("case", cases, ids=[case.title for case in cases])


def flatten(output: Any) -> list[Tensor]:
    if is_dataclass(output):
        output = [getattr(output, field.name) for field in fields(output)]
    return pytree.tree_leaves(output)


@select("narrowed", "dense")
def test_output_gradients_and_buffers_are_those_of_the_plain_network(case: Case) -> None:
    module = make(case)
    net = elastic(module, EXAMPLE)
    module, x = module.double(), torch.randn(4, 3, 8, 8, dtype=torch.float64)
    params = get_params(module)
    for name in net.trainable_names:
        params[name].requires_grad_()
    torch.manual_seed(1)
    outputs = flatten(net.run(params, net.full, x))
    weighted_sum(outputs).backward()
    torch.manual_seed(1)
    plain = flatten(module(x))
    weighted_sum(plain).backward()
    for index, (output, expected) in enumerate(zip(outputs, plain, strict=True)):
        assert_close(output, expected, f"output {index}")
    for name, parameter in module.named_parameters():
        grad, own = parameter.grad, params[name].grad
        zeros = torch.zeros_like(parameter)
        assert_close(zeros if own is None else own, zeros if grad is None else grad, name)
    for name, buffer in module.named_buffers():
        assert_close(params[name], buffer, name)


@select("narrowed", "dense")
def test_the_summary_says_what_is_not_narrowed(case: Case) -> None:
    net = elastic(make(case), EXAMPLE)
    assert case.says in net.summary()
    assert "full: head: " in net.summary()
    assert net.macs(0.5) < (0.9 if case.outcome == "dense" else 0.5) * net.macs(0.0)
    assert net.dense_fallbacks or case.outcome == "narrowed"


@select("refused")
def test_what_cannot_work_is_refused_in_one_line(case: Case) -> None:
    with pytest.raises(NotTraceable) as caught:
        elastic(make(case), EXAMPLE)
    message = str(caught.value)
    assert case.says in message
    assert "\n" not in message


def describe(module: nn.Module) -> dict[str, Any]:
    """Return every attribute, with copies of tensors and containers."""
    attributes = {}
    for path, submodule in module.named_modules():
        for name, value in vars(submodule).items():
            if name in ("_parameters", "_buffers"):
                value = {
                    key: (id(item), item.clone()) for key, item in value.items() if item is not None
                }
            attributes[f"{path}.{name}"] = repr(value)
    return attributes


@select("narrowed", "dense", "refused")
def test_the_network_and_the_generators_stay_as_they_were(case: Case) -> None:
    module = make(case)
    is_lazy = "lazy" in case.title
    before = {} if is_lazy else describe(module)
    random.seed(3)
    np.random.seed(4)
    torch.manual_seed(5)
    expected = random.random(), np.random.rand(), torch.rand(1)
    random.seed(3)
    np.random.seed(4)
    torch.manual_seed(5)
    try:
        elastic(module, EXAMPLE)
    except NotTraceable:
        assert case.outcome == "refused"
    assert (random.random(), np.random.rand(), torch.rand(1)) == expected
    assert is_lazy or describe(module) == before


class Caching(nn.Module):
    """A network that keeps its last activation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 4, 3), None

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.conv(x)
        return self.last.mean((2, 3))


def test_a_network_that_keeps_its_activations_can_be_saved() -> None:
    module = Caching()
    elastic(module, EXAMPLE)
    assert module.last is None
    torch.save(module, io.BytesIO())
    module(EXAMPLE)  # leaves a computed tensor, which cannot be copied as it is
    activation = module.last
    elastic(module, EXAMPLE)
    assert module.last is activation


@pytest.mark.parametrize(
    ("example", "says"),
    [
        (torch.zeros(1, 1, 8, 8), r"^stem is .* \(batch, 3, height, width\), got \(batch, 1, 8"),
        (torch.zeros(1, 1, 8, 8), r"is like torch.zeros\(1, 3, 32, 32\)$"),
        (torch.zeros(3, 8, 8), r"\(batch, 3, height, width\), got \(batch, 8, 8\)"),
        (torch.zeros(1, 3, 2, 8, 8), r"got \(batch, 3, 2, 8, 8\)"),
        ([torch.zeros(1, 3, 8, 8)], r"got a list \(use a tuple"),
        (np.zeros((1, 3, 8, 8)), r"got a numpy array \(use torch.from_numpy\)"),
        ((torch.zeros(1, 3, 8, 8), 3), "got a tuple with int"),
    ],
)  # fmt: skip
def test_a_wrong_example_is_refused_in_one_line(example: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        elastic(Body(), example)
    assert "\n" not in str(caught.value)


def test_the_page_of_the_docs_is_current() -> None:
    spec = importlib.util.spec_from_file_location("table", ROOT / "scripts" / "support_table.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.make_page() == script.PAGE.read_text(), "run `python scripts/support_table.py`"
