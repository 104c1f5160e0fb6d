"""Optimisers against torch's own, step by step in float64."""

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

from pliant.nn.optimiser import Adam, Optimiser, Sgd
from pliant.rng import stream

Theirs = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
PAIRS: list[tuple[Optimiser, Theirs, float]] = [
    (Sgd(lr=0.1), lambda p: torch.optim.SGD(p, 0.1), 0.0),
    (Sgd(lr=0.1, momentum=0.9), lambda p: torch.optim.SGD(p, 0.1, 0.9), 0.0),
    (
        Sgd(lr=0.05, momentum=0.5, weight_decay=0.1, clip=0.7),
        lambda p: torch.optim.SGD(p, 0.05, 0.5, weight_decay=0.1),
        0.7,
    ),
    (Sgd(lr=0.1, clip=1e3), lambda p: torch.optim.SGD(p, 0.1), 1e3),
    (Adam(lr=0.01), lambda p: torch.optim.Adam(p, 0.01), 0.0),
    (
        Adam(lr=0.02, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.3, clip=0.5),
        lambda p: torch.optim.Adam(p, 0.02, (0.8, 0.9), 1e-6, 0.3),
        0.5,
    ),
]


def numbers(*address: str | int) -> list[Tensor]:
    rng = stream(0, *address)
    return [torch.from_numpy(rng.standard_normal(shape)) for shape in ((3, 2), (4,), (1, 1))]


@pytest.mark.parametrize(("ours", "theirs", "clip"), PAIRS)
def test_a_step_is_torchs(ours: Optimiser, theirs: Theirs, clip: float) -> None:
    mine, twins = numbers("start"), [p.requires_grad_() for p in numbers("start")]
    state = [[torch.zeros_like(p) for p in mine] for _ in range(ours.memories)]
    torchs = theirs(twins)
    for time in range(1, 8):
        grads = numbers("gradient", time)
        ours.step(mine, grads, state, ours.lr, time)
        for twin, grad in zip(twins, numbers("gradient", time), strict=True):
            twin.grad = grad
        if clip:
            torch.nn.utils.clip_grad_norm_(twins, clip)
        torchs.step()
        for one, other in zip(mine, twins, strict=True):
            torch.testing.assert_close(one, other.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("ours", "theirs", "clip"), PAIRS)
def test_gradients_are_left_alone(ours: Optimiser, theirs: Theirs, clip: float) -> None:
    params, grads = numbers("start"), numbers("gradient")
    ours.step(params, grads, [[torch.zeros_like(p) for p in params]] * ours.memories, 0.1, 1)
    assert all(torch.equal(a, b) for a, b in zip(grads, numbers("gradient"), strict=True))


def test_this_steps_rate_counts() -> None:
    param = [torch.tensor([1.0])]
    Sgd(lr=0.1).step(param, [torch.tensor([2.0])], [], 0.25, 1)
    assert param[0].item() == 0.5


def test_clipping_is_by_the_norm_of_all_gradients_together() -> None:
    params = [torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)]
    grads = [torch.full((1,), 3.0).double(), torch.full((1,), 4.0).double()]
    Sgd(lr=1.0, clip=1.0).step(params, grads, [], 1.0, 1)
    assert [p.item() for p in params] == pytest.approx([-0.6, -0.8], rel=1e-6)


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (Sgd, {"lr": 0.0}),
        (Sgd, {"momentum": 1.0}),
        (Sgd, {"weight_decay": -1.0}),
        (Adam, {"beta1": 1.0}),
        (Adam, {"beta2": 1.0}),
        (Adam, {"eps": 0.0}),
    ],
)
def test_what_makes_no_sense_is_refused(kind: type[Optimiser], wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        kind(**wrong)
