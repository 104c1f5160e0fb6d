"""`pliant bench elastic`: a training step at several rates against plain networks.

The limit is the same step on a plain network that was built with exactly the kept shapes.
"""

import copy
import resource
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pliant.cli.timing import interleaved
from pliant.nn.elastic import Elastic, elastic
from pliant.nn.learner import Learner
from pliant.nn.models import INPUT_SHAPES, MODELS
from pliant.nn.optimiser import Sgd
from pliant.nn.subnet import Choice, Subnet
from pliant.params import params_of
from pliant.rng import stream
from pliant.value import Value

BATCH = 32  # as in the table of the goals


class Measured(Value, frozen=True):
    """One network's times in milliseconds and what they are in proportion."""

    network: str
    macs: float
    milliseconds: dict[str, float]
    ratios: dict[str, float]


def measure(name: str, seconds: float) -> Measured:
    """Time one bundled network."""
    torch.set_num_threads(1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = MODELS[name]()
        x = torch.randn(BATCH, *INPUT_SHAPES[name])
    flexible = elastic(net, x[:1])
    narrow = same_shape(net, flexible, half(flexible, 0))
    last = x.contiguous(memory_format=torch.channels_last)
    labels = torch.arange(BATCH) % 2

    def at(choose: Callable[[int], Subnet]) -> Callable[[], object]:
        return stepping(Learner(flexible, params_of(net), Sgd(lr=0.01)), choose, x, labels)

    work: dict[str, Callable[[], object]] = {
        "plain": plain(net, x, labels),
        "plain, channels last": plain(copy.deepcopy(net), last, labels),
        "elastic at 0": at(lambda step: flexible.full),
        "elastic at .25": at(quarter(flexible)),
        "elastic at .5": at(lambda step: half(flexible, step)),
        "elastic at .5, coins": at(coins(flexible)),
        "elastic at mixed rates, coins": at(mixed(flexible, "bernoulli")),
        "elastic at mixed rates, blocks": at(mixed(flexible, "blocks")),
        "same shape": plain(narrow, x, labels),
        "same shape, channels last": plain(copy.deepcopy(narrow), last, labels),
        "drawing and switching": switching(Learner(flexible, params_of(net), Sgd(lr=0.01))),
    }
    times = interleaved(work, seconds=seconds, clock=time.process_time)
    ratios = {
        "elastic at 0 / plain": times["elastic at 0"] / times["plain"],
        "elastic at .25 / plain": times["elastic at .25"] / times["plain"],
        "elastic at .5 / plain": times["elastic at .5"] / times["plain"],
        "elastic at .5, coins / plain": times["elastic at .5, coins"] / times["plain"],
        "mixed rates, blocks / coins": times["elastic at mixed rates, blocks"]
        / times["elastic at mixed rates, coins"],
        "elastic at .5 / same shape": times["elastic at .5"] / times["same shape"],
        "elastic at .5 / same shape, channels last": times["elastic at .5"]
        / times["same shape, channels last"],
        "elastic at 0 / plain, channels last": times["elastic at 0"]
        / times["plain, channels last"],
        "drawing and switching / step at .5": times["drawing and switching"]
        / times["elastic at .5"],
        "drawing and switching / plain": times["drawing and switching"] / times["plain"],
        "MACs at .5 / plain": flexible.macs(0.5) / flexible.macs(0.0),
    }
    return Measured(
        name, flexible.macs(0.0), {key: 1e3 * value for key, value in times.items()}, ratios
    )


def half(flexible: Elastic, step: int) -> Subnet:
    """Draw half of each site: new filters each step, in the same number."""
    return flexible.draw(0.5, stream(0, "bench", step), "rounded")


def quarter(flexible: Elastic) -> Callable[[int], Subnet]:
    """Return a draw that drops a quarter of each site."""
    return lambda step: flexible.draw(0.25, stream(0, "bench", step), "rounded")


def coins(flexible: Elastic) -> Callable[[int], Subnet]:
    """Return the paper's draw, in which shapes change from step to step."""
    return lambda step: flexible.draw(0.5, stream(0, "bench", step))


def mixed(flexible: Elastic, choice: Choice) -> Callable[[int], Subnet]:
    """Return draws at sixteen rate vectors in turn, as a device that adapts makes them."""
    vectors = stream(0, "vectors").uniform(0, 0.5, (16, len(flexible.sites)))
    return lambda step: flexible.draw(vectors[step % 16], stream(0, "bench", step), choice)


def plain(net: nn.Module, x: Tensor, labels: Tensor) -> Callable[[], object]:
    """Return a step of ordinary PyTorch training."""
    net.train()
    optimiser = torch.optim.SGD(net.parameters(), lr=0.01)

    def step() -> None:
        optimiser.zero_grad()
        loss: Any = F.cross_entropy(net(x), labels)
        loss.backward()
        optimiser.step()

    return step


def stepping(
    learner: Learner, choose: Callable[[int], Subnet], x: Tensor, labels: Tensor
) -> Callable[[], object]:
    """Return a step with a subnet of its own."""
    count = 0

    def step() -> None:
        nonlocal count
        count += 1
        learner.switch(choose(count))
        learner.step(x, lambda output: F.cross_entropy(output, labels))

    return step


def switching(learner: Learner) -> Callable[[], object]:
    """Return what a change of subnet costs by itself."""
    count = 0

    def step() -> None:
        nonlocal count
        count += 1
        learner.switch(half(learner.elastic, count))

    return step


def same_shape(net: nn.Module, flexible: Elastic, subnet: Subnet) -> nn.Module:
    """Build a plain network with exactly the shapes that a subnet keeps."""
    small = flexible.take(params_of(net), subnet)
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


def peak(name: str) -> dict[str, float]:
    """Return the memory in MB that a step adds at its peak: plain, and elastic at .5."""
    context = get_context("spawn")
    found = {}
    for kind in ("start", "plain", "elastic"):
        parent, child = context.Pipe()
        process = context.Process(target=_peak, args=(name, kind, child))
        process.start()
        found[kind] = float(parent.recv())
        process.join()
    return {kind: found[kind] - found["start"] for kind in ("plain", "elastic")}


def _peak(name: str, kind: str, answer: Any) -> None:
    torch.set_num_threads(1)
    net = MODELS[name]()
    x = torch.randn(4 * BATCH, *INPUT_SHAPES[name])
    labels = torch.arange(len(x)) % 2
    flexible = elastic(net, x[:1])
    learner = Learner(flexible, params_of(net), Sgd(lr=0.01))
    if kind == "plain":
        plain(net, x, labels)()
    elif kind == "elastic":
        stepping(learner, lambda step: half(flexible, step), x, labels)()
    answer.send(_highest())


def _highest() -> float:
    """Return the most memory in MB that this process has held."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage would include what the parent held before it started us
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        return float(lines["VmHWM"].split()[0]) / 2**10
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
