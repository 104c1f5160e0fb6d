"""`pliant bench elastic`: time training steps at several rates against plain networks.

The lower limit is the same step on a plain network built with exactly the kept shapes.
"""

import copy
import itertools
import platform
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pliant import runtime
from pliant.bench.timing import run_in_process, time_interleaved
from pliant.nn.elastic import Elastic, Rates, elastic
from pliant.nn.models import INPUT_SHAPES, MODELS
from pliant.nn.optimisers import Sgd
from pliant.nn.subnet import Sampling, Subnet
from pliant.nn.trainer import SubnetTrainer
from pliant.params import get_params
from pliant.rng import rng_stream
from pliant.value import Numbers, Value

BATCH = 32
Sampler = Callable[[int], Subnet]  # from the number of the step


class ElasticTimes(Value, frozen=True):
    """The step times of one network, and their ratios."""

    network: str
    macs: float
    milliseconds: dict[str, float]
    ratios: dict[str, float]

    def format_table(self, peaks: dict[str, float]) -> str:
        """Return the times, the ratios and the peaks of memory, if they were measured, as text."""
        rows = [f"{self.network}: {self.macs / 1e6:.2f} M MACs, batch 32, {platform.processor()}"]
        rows += [f"  {name:44} {value:9.2f} ms" for name, value in self.milliseconds.items()]
        rows += [f"  {name:44} {value:9.3f}" for name, value in self.ratios.items()]
        if peaks:
            ratio = peaks["elastic"] / peaks["plain"]
            rows.append(
                f"  {'peak memory at .5 / plain, batch 128':44} {ratio:9.3f}"
                f"  ({peaks['elastic']:.0f} of {peaks['plain']:.0f} MB)"
            )
        return "\n".join(rows)


def prepare_process() -> None:
    """Use one thread and keep freed memory, as workers do."""
    torch.set_num_threads(1)
    runtime.retain_freed_memory()


def make_inputs(name: str, batch: int, **options: Numbers) -> tuple[nn.Module, Tensor]:
    """Return a network and a mini-batch, always the same, for measurements on one thread."""
    prepare_process()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return MODELS[name](**options), torch.randn(batch, *INPUT_SHAPES[name])


def measure(name: str, seconds: float) -> ElasticTimes:
    net, x = make_inputs(name, BATCH)
    elastic_net = elastic(net, x[:1], check=False)
    steps = _make_steps(net, elastic_net, x)
    times = time_interleaved(steps, seconds=seconds, clock=time.process_time)
    ratios = _compute_ratios(times) | {
        "MACs at .5 / plain": elastic_net.macs(0.5) / elastic_net.macs(0.0)
    }
    milliseconds = {key: 1e3 * value for key, value in times.items()}
    return ElasticTimes(name, elastic_net.macs(0.0), milliseconds, ratios)


def _make_steps(net: nn.Module, elastic_net: Elastic, x: Tensor) -> dict[str, Callable[[], object]]:
    half = make_sampler(elastic_net, 0.5, "rounded")
    narrow = build_same_shape(net, elastic_net, half(0))
    last = x.contiguous(memory_format=torch.channels_last)
    labels = torch.arange(BATCH) % 2
    vectors = rng_stream(0, "vectors").uniform(0, 0.5, (16, len(elastic_net.sites)))

    def train(sample: Sampler) -> Callable[[], object]:
        return make_elastic_step(make_trainer(net, elastic_net), sample, x, labels)

    def train_mixed(sampling: Sampling) -> Callable[[], object]:
        samplers = [make_sampler(elastic_net, vector, sampling) for vector in vectors]
        return train(lambda step: samplers[step % 16](step))  # like an adapting device

    return {
        "plain": make_plain_step(net, x, labels),
        "plain, channels last": make_plain_step(copy.deepcopy(net), last, labels),
        "plain with nn.Dropout2d(.5)": make_plain_step(add_dropout(net, 0.5), x, labels),
        "elastic at 0": train(lambda step: elastic_net.full),
        "elastic at .25": train(make_sampler(elastic_net, 0.25, "rounded")),
        "elastic at .5": train(half),
        "elastic at .5, coins": train(make_sampler(elastic_net, 0.5, "bernoulli")),
        "elastic at mixed rates, coins": train_mixed("bernoulli"),
        "elastic at mixed rates, blocks": train_mixed("blocks"),
        "same shape": make_plain_step(narrow, x, labels),
        "same shape, channels last": make_plain_step(copy.deepcopy(narrow), last, labels),
        "drawing and switching": make_switch_step(make_trainer(net, elastic_net), half),
    }


def _compute_ratios(times: dict[str, float]) -> dict[str, float]:
    half, plain, switch = times["elastic at .5"], times["plain"], times["drawing and switching"]
    full, mixed = times["elastic at 0"], "elastic at mixed rates"
    return {
        "elastic at 0 / plain": full / plain,
        "elastic at .25 / plain": times["elastic at .25"] / plain,
        "elastic at .5 / plain": half / plain,
        "elastic at .5, coins / plain": times["elastic at .5, coins"] / plain,
        "elastic at .5 / nn.Dropout2d(.5)": half / times["plain with nn.Dropout2d(.5)"],
        "mixed rates, blocks / coins": times[f"{mixed}, blocks"] / times[f"{mixed}, coins"],
        "elastic at .5 / same shape": half / times["same shape"],
        "elastic at .5 / same shape, channels last": half / times["same shape, channels last"],
        "elastic at 0 / plain, channels last": full / times["plain, channels last"],
        "drawing and switching / step at .5": switch / half,
        "drawing and switching / plain": switch / plain,
    }


def make_trainer(net: nn.Module, elastic_net: Elastic) -> SubnetTrainer:
    """Return a trainer of a copy of the network's weights."""
    return SubnetTrainer(elastic_net, get_params(net), Sgd(lr=0.01))


def make_sampler(elastic_net: Elastic, rates: Rates, sampling: Sampling) -> Sampler:
    """Return a function that draws new filters each step.

    With "rounded" sampling their number is always the same; with "bernoulli", as in the paper, the
    shapes change from step to step.
    """
    return lambda step: elastic_net.draw(rates, rng_stream(0, "bench", step), sampling)


def make_plain_step(net: nn.Module, x: Tensor, labels: Tensor) -> Callable[[], object]:
    net.train()
    optimiser = torch.optim.SGD(net.parameters(), lr=0.01)

    def step() -> None:
        optimiser.zero_grad()
        loss: Any = F.cross_entropy(net(x), labels)
        loss.backward()
        optimiser.step()

    return step


def make_elastic_step(
    trainer: SubnetTrainer, sample: Sampler, x: Tensor, labels: Tensor
) -> Callable[[], object]:
    """Return a step that trains a new subnet each time."""
    switch = make_switch_step(trainer, sample)

    def step() -> None:
        switch()
        trainer.step(x, lambda output: F.cross_entropy(output, labels))

    return step


def make_switch_step(trainer: SubnetTrainer, sample: Sampler) -> Callable[[], object]:
    """Return a step that only switches the subnet."""
    numbers = itertools.count(1)
    return lambda: trainer.switch(sample(next(numbers)))


def add_dropout(net: nn.Module, rate: float) -> nn.Module:
    """Copy a network and mask the output of every convolution, which drops filters but no work."""
    masked = copy.deepcopy(net)
    for module in list(masked.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Conv2d):
                setattr(module, name, nn.Sequential(child, nn.Dropout2d(rate)))
    return masked


def build_same_shape(net: nn.Module, elastic_net: Elastic, subnet: Subnet) -> nn.Module:
    """Build a plain network with exactly the shapes that a subnet keeps."""
    small = elastic_net.take(get_params(net), subnet)
    narrow = copy.deepcopy(net)
    for path, module in narrow.named_modules():
        prefix = f"{path}." if path else ""
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(small.get(prefix + name, parameter).clone()))
        for name, buffer in list(module.named_buffers(recurse=False)):
            module.register_buffer(name, small.get(prefix + name, buffer).clone())
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            depthwise = module.groups > 1
            module.out_channels = module.weight.shape[0]
            module.in_channels = module.weight.shape[0 if depthwise else 1]
            module.groups = module.in_channels if depthwise else 1
        elif isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape
        elif isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
            module.num_features = module.weight.shape[0]
    return narrow


def measure_peak_memory(name: str) -> dict[str, float]:
    """Return the peak memory in MB that a step adds, plain and elastic at .5."""
    start, plain, half = (
        run_in_process(_measure_peak_memory, name, kind) for kind in ("start", "plain", "elastic")
    )
    return {"plain": plain - start, "elastic": half - start}


def _measure_peak_memory(name: str, kind: str) -> float:
    net, x = make_inputs(name, 4 * BATCH)
    labels = torch.arange(len(x)) % 2
    elastic_net = elastic(net, x[:1], check=False)
    trainer = make_trainer(net, elastic_net)  # its buffers belong to the start
    if kind == "plain":
        make_plain_step(net, x, labels)()
    elif kind == "elastic":
        make_elastic_step(trainer, make_sampler(elastic_net, 0.5, "rounded"), x, labels)()
    return _read_peak_memory()


def _read_peak_memory() -> float:
    status = Path("/proc/self/status")
    if status.exists():  # getrusage would include the parent's peak before the fork
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        return float(lines["VmHWM"].split()[0]) / 2**10
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
