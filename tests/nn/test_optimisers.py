"""Compare optimisers with torch's, step by step in float64."""

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

from pliant.nn.optimisers import Adam, Optimiser, Sgd
from pliant.rng import rng_stream

TorchOptimiser = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
PAIRS: list[tuple[Optimiser, TorchOptimiser, float]] = [
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


def make_tensors(*address: str | int) -> list[Tensor]:
    rng = rng_stream(0, *address)
    return [torch.from_numpy(rng.standard_normal(shape)) for shape in ((3, 2), (4,), (1, 1))]


@pytest.mark.parametrize(("ours", "theirs", "clip"), PAIRS)
def test_a_step_equals_torchs(ours: Optimiser, theirs: TorchOptimiser, clip: float) -> None:
    our_params = make_tensors("start")
    their_params = [p.requires_grad_() for p in make_tensors("start")]
    state = [[torch.zeros_like(p) for p in our_params] for _ in range(ours.num_state_tensors)]
    optimiser = theirs(their_params)
    for step_count in range(1, 8):
        grads = make_tensors("gradient", step_count)
        ours.step(our_params, grads, state, ours.lr, step_count)
        for param, grad in zip(their_params, make_tensors("gradient", step_count), strict=True):
            param.grad = grad
        if clip:
            torch.nn.utils.clip_grad_norm_(their_params, clip)
        optimiser.step()
        for our_param, their_param in zip(our_params, their_params, strict=True):
            torch.testing.assert_close(our_param, their_param.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("ours", "theirs", "clip"), PAIRS)
def test_gradients_are_not_modified(ours: Optimiser, theirs: TorchOptimiser, clip: float) -> None:
    params, grads = make_tensors("start"), make_tensors("gradient")
    ours.step(
        params, grads, [[torch.zeros_like(p) for p in params]] * ours.num_state_tensors, 0.1, 1
    )
    assert all(torch.equal(a, b) for a, b in zip(grads, make_tensors("gradient"), strict=True))


def test_the_learning_rate_of_the_step_is_used() -> None:
    param = [torch.tensor([1.0])]
    Sgd(lr=0.1).step(param, [torch.tensor([2.0])], [], 0.25, 1)
    assert param[0].item() == 0.5


def test_clipping_is_by_the_norm_of_all_gradients_together() -> None:
    params = [torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)]
    grads = [torch.full((1,), 3.0).double(), torch.full((1,), 4.0).double()]
    Sgd(lr=1.0, clip=1.0).step(params, grads, [], 1.0, 1)
    assert [p.item() for p in params] == pytest.approx([-0.6, -0.8], rel=1e-6)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (Sgd, {"lr": 0.0}),
        (Sgd, {"momentum": 1.0}),
        (Sgd, {"weight_decay": -1.0}),
        (Adam, {"beta1": 1.0}),
        (Adam, {"beta2": 1.0}),
        (Adam, {"eps": 0.0}),
    ],
)
def test_invalid_settings_are_refused(kind: type[Optimiser], settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        kind(**settings)
