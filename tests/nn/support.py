"""Networks that do more than run layers, for `support_cases`."""

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

Outcome = Literal["narrowed", "dense", "refused"]
Middle = Callable[["Body", Tensor], Any]


class Body(nn.Module):
    """Two convolutions with something between them, and a linear head."""

    def __init__(self, middle: Middle = lambda net, x: x, last: int = 6) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.norm, self.drop = nn.BatchNorm2d(6), nn.Dropout(0.5)
        self.body = nn.Conv2d(6, 6, 1)
        self.last, self.head = nn.Conv2d(last, 5, 3), nn.Linear(5, 3)
        self.register_buffer("average", torch.zeros(1))
        self.steps, self.features, self.cache = 0, [], None
        self._middle = middle

    def forward(self, x: Tensor) -> Any:
        y = self._middle(self, F.relu(self.stem(x)))
        return self.head(F.relu(self.last(y)).mean((2, 3)))


@dataclass(frozen=True)
class Case:
    """A network, what `elastic` makes of it, and what it says about that."""

    title: str  # as in the docs
    outcome: Outcome
    make: Callable[[], nn.Module]
    says: str = ""  # in the summary, or in the error


class Square(torch.autograd.Function):
    """A function with a gradient of its own, twice the true one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 4 * ctx.saved_tensors[0] * grad


def run_checkpoint(net: Body, x: Tensor, *, use_reentrant: bool) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return checkpoint(lambda y: F.relu(net.body(y)), x, use_reentrant=use_reentrant)


def freeze_norm() -> nn.Module:
    net = Body(lambda net, x: net.norm(x))
    net.norm.running_mean.fill_(0.3)
    net.norm.running_var.fill_(2.0)
    net.norm.eval()
    return net


def switch_dropout_off() -> nn.Module:
    net = Body(lambda net, x: net.drop(x))
    net.drop.eval()
    return net


def add_hook(kind: str, path: str) -> nn.Module:
    net = Body(lambda net, x: net.body(x))
    module = net.get_submodule(path)
    if kind == "forward":
        module.register_forward_hook(lambda module, inputs, output: output * 2)
    elif kind == "before":
        module.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
    elif kind == "backward":
        module.register_full_backward_hook(lambda module, grads, outputs: None)
    else:
        module.weight.register_hook(lambda grad: grad * 2)
    return net


def write_through_view(net: Body, x: Tensor) -> Tensor:
    x.flatten(2).mul_(2)
    return x


def write_under_view(net: Body, x: Tensor) -> Tensor:
    first = x[:, :3]
    x.mul_(2)
    return torch.cat([first, x[:, 3:]], 1)


def write_to_half(net: Body, x: Tensor) -> Tensor:
    y = net.body(x)
    left, right = y[:, :3], y[:, 3:]
    right.mul_(2)
    return torch.cat([left, right], 1)


def assign_part(net: Body, x: Tensor) -> Tensor:
    x[:, :2] = 0
    return x


def run_autocast(net: Body, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return net.body(x).to(x.dtype)


def count_steps(net: Body, x: Tensor) -> Tensor:
    net.steps += 1
    return x * 0.9**net.steps


def count_calls(net: Body, x: Tensor) -> Tensor:
    net.steps += 1
    return net.body(x)


def drop_path(net: Body, x: Tensor) -> Tensor:
    return x if random.random() < 0.01 else net.body(x)


def draw_one(net: Body, x: Tensor) -> Tensor:
    return net.body(x) * torch.rand(1)


def drop_samples(net: Body, x: Tensor) -> Tensor:
    keep = (torch.rand(x.shape[0], 1, 1, 1) + 0.8).floor()
    return x + net.body(x) * keep


def cache_features(net: Body, x: Tensor) -> Tensor:
    net.cache, net.auxiliary_loss = x, x.square().mean((2, 3))
    net.features.append(x)
    return net.body(x)


def average_in_buffer(net: Body, x: Tensor) -> Tensor:
    net.average = 0.9 * net.average + 0.1 * x.detach().mean()
    return net.body(x)


def average_in_place(net: Body, x: Tensor) -> Tensor:
    with torch.no_grad():
        net.average.mul_(0.9).add_(0.1 * x.mean())
    return net.body(x)


def divide_by_variance(net: Body, x: Tensor) -> Tensor:
    pixels = net.body(x - x.amax((2, 3), True)).permute(0, 2, 3, 1)
    return (pixels / (1 + pixels.var((1, 2), False, True))).permute(0, 3, 1, 2)


def rearrange(x: Any) -> Any:
    """Look at the type of its argument, as the backends of einops do."""
    if not isinstance(x, Tensor):
        raise RuntimeError(f"Tensor type unknown to einops {type(x)}")
    return x.transpose(2, 3)


@torch.fx.wrap
def wrapped_rearrange(x: Any) -> Any:
    return rearrange(x)


@dataclass
class Result:
    """An output with named parts."""

    logits: Tensor
    features: Tensor


class Pair(NamedTuple):
    """The same, as a tuple."""

    logits: Tensor
    features: Tensor


class Returning(Body):
    """A network that returns its features too."""

    def __init__(self, kind: Callable[..., Any]) -> None:
        super().__init__(lambda net, x: net.body(x))
        self._kind = kind

    def forward(self, x: Tensor) -> Any:
        logits = super().forward(x)
        return self._kind(logits, logits.softmax(1))


class StandardisedConv(nn.Conv2d):
    """A convolution with standardised weights."""

    def forward(self, x: Tensor) -> Tensor:
        centred = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        weight = centred / (centred.std((1, 2, 3), keepdim=True) + 1e-5)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding)


def replace_body(layer: Callable[[], nn.Module]) -> nn.Module:
    net = Body(lambda net, x: net.body(x))
    net.body = make_quietly(layer)
    return net


def make_quietly(make: Callable[[], nn.Module]) -> nn.Module:
    """Make a module without warnings that torch's older tools are deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


def share_body(net: Body, x: Tensor) -> Tensor:
    first = net.body(x)
    return torch.cat([first, net.body(torch.tanh(first))], 1)


class Recurrent(nn.Module):
    """Convolutions over time, then a recurrent layer with few hidden units."""

    def __init__(self, cell: type[nn.RNNBase]) -> None:
        super().__init__()
        self.stem, self.body = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 16, (3, 1))
        self.cell, self.head = cell(64, 2, batch_first=True), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.body(F.relu(self.stem(x))))
        return self.head(self.cell(y.permute(0, 3, 1, 2).flatten(2))[0][:, -1])


class Doubled(nn.Module):
    """A parametrization of our own."""

    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def parametrize_own(layer: nn.Module) -> nn.Module:
    return parametrize.register_parametrization(layer, "weight", Doubled())


def make_jit() -> nn.Module:
    script = make_quietly(lambda: torch.jit.script(nn.Sequential(nn.ReLU())))
    return nn.Sequential(nn.Conv2d(3, 4, 3), script)


def make_conv() -> nn.Conv2d:
    return nn.Conv2d(6, 6, 1)


def between(title: str, outcome: Outcome, middle: Middle, says: str = "", last: int = 6) -> Case:
    return Case(title, outcome, lambda: Body(middle, last), says)
