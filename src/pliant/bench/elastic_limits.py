"""`pliant bench elastic --limits`: ratios of elastic to plain training steps, and their limits."""

import copy
import time
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pliant.bench.elastic import (
    build_same_shape,
    make_elastic_step,
    make_inputs,
    make_plain_step,
    make_sampler,
    make_trainer,
    prepare_process,
)
from pliant.bench.elastic_families import FAMILIES, INNER_LIMIT, measure_macs
from pliant.bench.timing import Measurement, measure_ratio, run_in_process
from pliant.nn.elastic import Elastic, elastic
from pliant.nn.models import MODELS, lenet
from pliant.nn.subnet import Sampling, Subnet

SECONDS = 3.0  # per ratio
TIGHT = 3  # times as long, for ratios that are close to their limits
COIN_STEPS = 40  # until most of the kernels for the shapes that coins give are compiled
FULL_WIDTH_LIMITS = {2: 1.10, 8: 1.05, 32: 1.02}  # by batch
SAME_SHAPE = ("densenet40", "resnet20", "femnist_cnn")
SMALL_BATCH, FAMILY_BATCH = 8, 32
CHECK_STEPS, CHECK_SECONDS = 8, 3.0
DEFAULT_SAMPLING: Sampling = "blocks"


class TinyUNet(nn.Module):
    """Segment images of one channel at two resolutions below their own."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            [_make_unit(1, width), _make_unit(width, 2 * width), _make_unit(2 * width, 4 * width)]
        )
        self.up = nn.ModuleList([_make_unit(6 * width, 2 * width), _make_unit(3 * width, width)])
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down[0](x)
        second = self.down[1](F.max_pool2d(first, 2))
        x = self.down[2](F.max_pool2d(second, 2))
        for layer, skipped in zip(self.up, (second, first), strict=True):
            x = layer(torch.cat([F.interpolate(x, scale_factor=2.0), skipped], 1))
        out: Tensor = self.head(x)
        return out


def _make_unit(inputs: int, outputs: int) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())


def make_ecg_net() -> nn.Sequential:
    """Make a network for signals of one channel, like an electrocardiogram."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((1, 16), (16, 32), (32, 64)):
        layers += [nn.Conv1d(inputs, outputs, 7, padding=3), nn.BatchNorm1d(outputs), nn.ReLU()]
        layers.append(nn.MaxPool1d(2))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(64, 5))


SMALL_NETWORKS: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "LeNet": (lenet, (3, 32, 32)),
    "tiny U-Net": (TinyUNet, (1, 32, 32)),
    "Conv1d ECG network": (make_ecg_net, (1, 256)),
}


class ResidualBottleneck(nn.Module):
    """A residual block of ResNet-152."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 4 * width, 1, bias=False),
            nn.BatchNorm2d(4 * width),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != 4 * width:
            convolution = nn.Conv2d(inputs, 4 * width, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.convolutions(x) + self.shortcut(x))


def make_resnet152() -> nn.Sequential:
    """Make ResNet-152 (He et al., CVPR 2016, table 1)."""
    stem = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
    layers: list[nn.Module] = [stem, nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for width, blocks, stride in ((64, 3, 1), (128, 8, 2), (256, 36, 2), (512, 3, 2)):
        for block in range(blocks):
            layers.append(ResidualBottleneck(inputs, width, stride if block == 0 else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


def measure_limits(seconds: float) -> Iterator[Measurement]:
    """Measure every ratio that has a limit, each for `seconds` or a few times as long."""
    for name in MODELS:
        if name == "densenet_bc":  # by default, this is densenet40
            continue
        for batch, limit in FULL_WIDTH_LIMITS.items():
            ratio = _measure_full_width(name, batch, seconds)
            yield Measurement(
                f"at 0 / plain channels last, {name}, batch {batch}", ratio, "", limit
            )
    for name, (make, shape) in SMALL_NETWORKS.items():
        ratio = _measure_half(*_make_small(make, shape), seconds)
        yield Measurement(
            f"default draw at .5 / plain, {name}, batch {SMALL_BATCH}", ratio, "", 1.0
        )
    yield from _measure_families(seconds)
    # in new processes: what ran before changes the memory, and thereby the ratio by a few percent
    ratio = run_in_process(_measure_coins, TIGHT * seconds)
    yield Measurement("coins at .5 / plain, densenet40, batch 32", ratio, "", 0.4)
    for name in SAME_SHAPE:
        ratio = run_in_process(_measure_same_shape, name, TIGHT * seconds)
        yield Measurement(f"at .5 / same shape channels last, {name}", ratio, "", 1.0)
    taken, step = run_in_process(_measure_resnet152)
    limit = CHECK_STEPS * step + CHECK_SECONDS
    yield Measurement("elastic() on ResNet-152 with its check", taken, "s", limit)


def _measure_families(seconds: float) -> Iterator[Measurement]:
    for name, family in FAMILIES.items():
        net, x = _make_small(family.make, family.shape, FAMILY_BATCH)
        flexible = elastic(net, x[:1], check=False)
        macs = measure_macs(flexible)
        yield Measurement(f"MACs at .5 / all, {name}", macs, "", family.macs_limit)
        if name == "vit_small":
            macs = measure_macs(flexible, keeps_width=True)
            yield Measurement(f"MACs of heads and MLPs at .5 / all, {name}", macs, "", INNER_LIMIT)
        ratio = _measure_half(net, x, seconds)
        title = f"default draw at .5 / plain, {name}, batch {FAMILY_BATCH}"
        yield Measurement(title, ratio, "", family.time_limit)


def _make_labels(net: nn.Module, x: Tensor) -> Tensor:
    """Return labels for a network that classifies samples or pixels."""
    with torch.no_grad():
        shape = net(x).shape
    return torch.zeros((shape[0], *shape[2:]), dtype=torch.long)


def _make_step(
    net: nn.Module, elastic_net: Elastic, x: Tensor, sample: Callable[[int], Subnet]
) -> Callable[[], object]:
    trainer = make_trainer(net, elastic_net)
    return make_elastic_step(trainer, sample, x, _make_labels(net, x))


def _make_channels_last_step(net: nn.Module, x: Tensor) -> Callable[[], object]:
    last = x.contiguous(memory_format=torch.channels_last)
    return make_plain_step(copy.deepcopy(net), last, _make_labels(net, x))


def _measure_full_width(name: str, batch: int, seconds: float) -> float:
    net, x = make_inputs(name, batch)
    elastic_net = elastic(net, x[:1], check=False)
    step = _make_step(net, elastic_net, x, lambda _: elastic_net.full)
    return measure_ratio(step, _make_channels_last_step(net, x), seconds=seconds)


def _make_small(
    make: Callable[[], nn.Module], shape: tuple[int, ...], batch: int = SMALL_BATCH
) -> tuple[nn.Module, Tensor]:
    prepare_process()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make(), torch.randn(batch, *shape)


def _measure_half(
    net: nn.Module,
    x: Tensor,
    seconds: float,
    *,
    sampling: Sampling = DEFAULT_SAMPLING,
    warm_up: int = 0,
) -> float:
    elastic_net = elastic(net, x[:1], check=False)
    step = _make_step(net, elastic_net, x, make_sampler(elastic_net, 0.5, sampling))
    for _ in range(warm_up):
        step()
    return measure_ratio(step, make_plain_step(net, x, _make_labels(net, x)), seconds=seconds)


def _measure_coins(seconds: float) -> float:
    net, x = make_inputs("densenet40", 32)
    return _measure_half(net, x, seconds, sampling="bernoulli", warm_up=COIN_STEPS)


def _measure_same_shape(name: str, seconds: float) -> float:
    net, x = make_inputs(name, 32)
    elastic_net = elastic(net, x[:1], check=False)
    sample = make_sampler(elastic_net, 0.5, "rounded")  # always as many filters
    narrow = build_same_shape(net, elastic_net, sample(0))
    step = _make_step(net, elastic_net, x, sample)
    return measure_ratio(step, _make_channels_last_step(narrow, x), seconds=seconds)


def _measure_resnet152() -> tuple[float, float]:
    return measure_check(make_resnet152(), torch.randn(1, 3, 224, 224))


def measure_check(net: nn.Module, x: Tensor) -> tuple[float, float]:
    """Return the CPU seconds of `elastic()` with its check, and of the fastest of two plain steps.

    A step of ResNet-152 takes seconds, so there are no more of them.
    """
    prepare_process()
    step = make_plain_step(copy.deepcopy(net), x, _make_labels(net, x))
    step()  # compiles kernels
    step_seconds = min(_time(step) for _ in range(2))
    return _time(lambda: elastic(net, x)), step_seconds


def _time(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start
