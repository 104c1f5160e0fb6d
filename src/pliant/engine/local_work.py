"""Local work: the job of a task, its mini-batches and the subnets that train on them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pliant.compression import AnyCompression, Uncompressed
from pliant.data import cycle_batches
from pliant.engine.worker_context import WorkerContext
from pliant.methods.base import Step, SubnetSteps, Task, TaskKey, Update, count_steps
from pliant.methods.error_feedback import simulate_compression
from pliant.nn.subnet import Subnet
from pliant.params import Params, find_device

EXTRA_PREFIX = "extra/"  # of tensors sent along with the network

RowAndMacs = tuple[int, float]  # the row of a step and its planned MACs


@dataclass(frozen=True)
class Job:
    """One device's training in one round: the row of each step, and the device's state."""

    key: TaskKey
    rows: tuple[int, ...]
    macs: tuple[float, ...]  # planned, of each step
    lr: float
    device_state: Any  # None before its first task
    num_samples: int = 0  # on the device
    classes: tuple[int, ...] = ()  # of these samples
    compression: AnyCompression = field(default_factory=Uncompressed)
    residual: Params = field(default_factory=dict)  # of the device's last merged update

    @property
    def cost(self) -> float:
        """Return the planned MACs of the job."""
        return sum(self.macs)


def run_job(context: WorkerContext, shared: Params, job: Job) -> Update:
    """Train one task; `shared` holds the network and, under `EXTRA_PREFIX`, what else is sent."""
    planned = [*zip(job.rows, job.macs, strict=True), None]
    steps = iter_steps(context, job.key, planned.__getitem__, job.num_samples)
    task = make_task(context, shared, job)
    update = context.train(task, steps)
    if isinstance(job.compression, Uncompressed) or not _is_well_formed(update, task):
        return update  # a malformed one is left for validation to reject
    return simulate_compression(context.net, update, job.compression, job.residual)


def _is_well_formed(update: Update, task: Task) -> bool:
    """Return whether the delta has the names and shapes of the task's params."""
    delta: Any = getattr(update, "delta", None)
    is_complete = isinstance(delta, dict) and delta.keys() == task.params.keys()
    return is_complete and all(
        isinstance(delta[name], Tensor) and delta[name].shape == tensor.shape
        for name, tensor in task.params.items()
    )


def make_task(context: WorkerContext, shared: Params, job: Job) -> Task:
    """Return the task that the device of a job is sent."""
    params = {name: tensor for name, tensor in shared.items() if not name.startswith(EXTRA_PREFIX)}
    extra = {
        name.removeprefix(EXTRA_PREFIX): tensor
        for name, tensor in shared.items()
        if name.startswith(EXTRA_PREFIX)
    }
    packed = context.subnet_to_send(job.rows[0], job.key)
    return Task(
        job.key,
        params if packed is None else context.net.take(params, packed),
        job.lr,
        packed,
        extra,
        job.device_state,
        job.num_samples,
        job.classes,
    )


def iter_steps(
    context: WorkerContext,
    key: TaskKey,
    choose: Callable[[int], RowAndMacs | None],
    samples: int = 0,
) -> Iterator[Step]:
    """Yield mini-batches with their subnets; `choose` is called for each one as it is requested.

    They are drawn from the device's first samples, or from all of them.
    """
    local, share = context.method.local, context.data.get_share(key.device)[: samples or None]
    batches = cycle_batches(
        context.data.train,
        share,
        local.batch,
        key.seed,
        key.round,
        key.device,
        drop_short=local.drop_short,
        augment=local.augment,
    )
    number, torch_device = 0, find_device(context.net.module)
    while (choice := choose(number)) is not None:
        row, macs = choice
        scale = context.scale_inputs(row)
        x, y = (part.to(torch_device) for part in scale.apply(*next(batches)))
        yield Step(x, y, context.select_subnet(row, key, number), macs, scale, row)
        number += 1


def redraw_subnets(
    context: WorkerContext, key: TaskKey, rows: Sequence[int], extra: Params
) -> SubnetSteps:
    """Return the subnets of the steps as runs of (subnet, number of steps).

    `extra` holds the tensors sent along with the network, by which some methods choose filters.
    """
    selector, net = context.filter_selector, context.net
    by_counts: dict[tuple[int, ...], Subnet] = {}
    subnets: list[Subnet] = []
    for step, row in enumerate(rows):
        subnet = context.select_subnet(row, key, step)
        if selector is not None:
            if subnet.counts not in by_counts:
                by_counts[subnet.counts] = selector.select_filters(net, subnet, extra, key)
            subnet = by_counts[subnet.counts]
        subnets.append(subnet)
    return count_steps(subnets)
