"""The mini-batches of a task: their sizes, their costs and the subnets that train on them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from pliant.data import FederatedData, make_batches
from pliant.methods.base import (
    LocalTraining,
    Method,
    SelectsFilters,
    Step,
    SubnetSteps,
    Task,
    TaskKey,
    Update,
)
from pliant.nn.elastic import Elastic, elastic
from pliant.nn.subnet import Subnet
from pliant.params import Params


@dataclass(frozen=True, eq=False)
class WorkerContext:
    """The network, data and method that a worker keeps between jobs."""

    net: Elastic
    data: FederatedData
    method: Method


EXTRA_PREFIX = "extra/"  # of tensors sent along with the network

WorkerInputFactory = Callable[[], tuple[nn.Module, FederatedData]]


def build_context(make_inputs: WorkerInputFactory, method: Method) -> WorkerContext:
    """Build the context of a worker."""
    net, data = make_inputs()
    return WorkerContext(elastic(net, make_example_input(data)), data, method)


def make_example_input(data: FederatedData) -> Tensor:
    """Return one training image, to trace the network with."""
    return data.train.get_normalised(slice(0, 1))


@dataclass(frozen=True)
class Job:
    """One device's training in one round: the row of each step, and the device's state."""

    key: TaskKey
    rows: tuple[int, ...]
    macs: tuple[float, ...]  # planned, of each step
    lr: float
    device_state: Params
    num_samples: int = 0  # on the device
    classes: tuple[int, ...] = ()  # of these samples

    @property
    def cost(self) -> float:
        """Return the planned MACs of the job."""
        return sum(self.macs)


def run_job(context: WorkerContext, shared: Params, job: Job) -> Update:
    """Train one task; `shared` holds the network and, under `EXTRA_PREFIX`, what else is sent."""
    task = make_task(context.method, context.net, shared, job)
    return context.method.train(context.net, task, iter_steps(context, job))


def make_task(method: Method, net: Elastic, shared: Params, job: Job) -> Task:
    """Return the task that the device of a job is sent."""
    params = {name: tensor for name, tensor in shared.items() if not name.startswith(EXTRA_PREFIX)}
    extra = {
        name.removeprefix(EXTRA_PREFIX): tensor
        for name, tensor in shared.items()
        if name.startswith(EXTRA_PREFIX)
    }
    packed = method.subnet_to_send(net, job.rows[0], job.key)
    return Task(
        job.key,
        params if packed is None else net.take(params, packed),
        job.lr,
        packed,
        extra,
        job.device_state,
        job.num_samples,
        job.classes,
    )


def iter_steps(context: WorkerContext, job: Job) -> Iterator[Step]:
    """Yield the mini-batches of a job with their subnets."""
    local, key = context.method.local, job.key
    share = context.data.shares[key.device % len(context.data)]
    steps_per_epoch = -(-len(share) // local.batch)
    for number, (row, macs) in enumerate(zip(job.rows, job.macs, strict=True)):
        epoch, index = divmod(number, steps_per_epoch)
        if index == 0:
            batches = make_batches(
                context.data.train, share, local.batch, key.seed, key.round, key.device, epoch
            )
        x, y = batches[index]
        yield Step(x, y, context.method.select_subnet(context.net, row, key, number), macs)


@dataclass(frozen=True, eq=False)
class LocalWork:
    """The mini-batch sizes of one task, and the MACs per sample of the full network."""

    sizes: tuple[int, ...]
    full_macs: float

    def macs_left(self, step: int) -> float:
        """Return the full network's MACs of a step and all later ones."""
        return self.full_macs * sum(self.sizes[step:])


def make_local_work(samples: int, local: LocalTraining, full_macs: float) -> LocalWork:
    """Return the mini-batches of a device with this many samples."""
    full_batches, rest = divmod(samples, local.batch)
    epoch = [local.batch] * full_batches + ([rest] if rest else [])
    return LocalWork(tuple(epoch * local.epochs), full_macs)


def redraw_subnets(
    context: WorkerContext, key: TaskKey, rows: Sequence[int], extra: Params
) -> SubnetSteps:
    """Return the subnets of the steps as runs of (subnet, number of steps).

    `extra` holds the tensors sent along with the network, by which some methods choose filters.
    """
    method, net = context.method, context.net
    by_counts: dict[tuple[int, ...], Subnet] = {}
    runs: list[tuple[Subnet, int]] = []
    for step, row in enumerate(rows):
        subnet = method.select_subnet(net, row, key, step)
        if isinstance(method, SelectsFilters):
            if subnet.counts not in by_counts:
                by_counts[subnet.counts] = method.select_filters(net, subnet, extra, key)
            subnet = by_counts[subnet.counts]
        if runs and runs[-1][0] is subnet:
            runs[-1] = (subnet, runs[-1][1] + 1)
        else:
            runs.append((subnet, 1))
    return tuple(runs)
