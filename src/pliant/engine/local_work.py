"""Local work: the mini-batches of a task, their costs and the subnets that train on them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from pliant.compression import AnyCompression, Uncompressed
from pliant.data import FederatedData, count_batches, cycle_batches
from pliant.devices import FULL_NETWORK, BudgetPolicy, DeviceCosts
from pliant.devices.budget import BoolArray
from pliant.devices.vector_rng import FloatArray, IntArray
from pliant.methods.aggregation import (
    MergesStream,
    UpdateStream,
    apply_delta,
    average_deltas,
    open_stream,
    weight_by,
)
from pliant.methods.base import (
    BoundsFilters,
    Broadcasts,
    CountsFilters,
    HasBudgetPolicy,
    HasStepCost,
    LocalTraining,
    Merges,
    Method,
    SelectsFilters,
    SelectsSubnets,
    SendsSubnets,
    Step,
    SubnetSteps,
    Task,
    TaskKey,
    TaskKeys,
    Trains,
    Update,
    count_steps,
    train_locally,
)
from pliant.methods.error_feedback import simulate_compression
from pliant.methods.state import init_device_state
from pliant.nn.elastic import Elastic, ElasticOptions, elastic
from pliant.nn.filter_counts import make_count_costs
from pliant.nn.memory import MemoryBounds, bound_memory
from pliant.nn.subnet import Subnet
from pliant.params import Params, nbytes

EXTRA_PREFIX = "extra/"  # of tensors sent along with the network

InputFactory = Callable[[], tuple[nn.Module, FederatedData]]
RowAndMacs = tuple[int, float]  # the row of a step and its planned MACs


@dataclass(frozen=True, eq=False)
class LocalWork:
    """The mini-batch sizes of one task, and the MACs per sample of the full network."""

    sizes: tuple[int, ...]
    full_macs: float

    def macs_left(self, step: int) -> float:
        """Return the full network's MACs of a step and all later ones."""
        return self.full_macs * sum(self.sizes[step:])


@dataclass(frozen=True, eq=False)
class WorkerContext:
    """The network, data and method of a run, as its workers, devices and server hold them."""

    net: Elastic
    data: FederatedData
    method: Method

    @cached_property
    def full_macs(self) -> float:
        """Return the MACs per sample of a training step of the full network."""
        return self.net.macs(self.net.full, training=True)

    @cached_property
    def _data_summaries(self) -> dict[int, tuple[int, tuple[int, ...]]]:
        return {}

    def get_share(self, device: int) -> NDArray[np.int64]:
        """Return the indices of a device's samples."""
        return self.data.shares[device % len(self.data)]

    def summarise_data(self, device: int) -> tuple[int, tuple[int, ...]]:
        """Return the number of samples on a device, and their classes."""
        index = device % len(self.data)
        if index not in self._data_summaries:
            share = self.data.shares[index]
            classes = np.unique(self.data.train.labels.numpy()[share])
            self._data_summaries[index] = len(share), tuple(classes.tolist())
        return self._data_summaries[index]

    def plan_work(self, device: int) -> LocalWork:
        """Return the mini-batches of a device's task."""
        local = self.method.local
        epoch = list_batch_sizes(len(self.get_share(device)), local)
        return LocalWork(epoch * local.epochs, self.full_macs)

    def compute_batch_sizes(self, devices: IntArray) -> FloatArray:
        """Return the samples of each mini-batch, as (device, step)."""
        sizes = [self.plan_work(device).sizes for device in devices.tolist()]
        longest = max(map(len, sizes), default=1)  # there may be no devices
        padded = [row + (0,) * (longest - len(row)) for row in sizes]
        return np.array(padded, np.float64).reshape(len(sizes), longest)

    # What a method leaves out is what FedAvg does. What every step needs is checked once:
    # isinstance with a protocol takes longer than the rest of a step's cost.

    @cached_property
    def budget_policy(self) -> BudgetPolicy:
        """Return the policy by which devices choose the cost of each mini-batch."""
        if isinstance(self.method, HasBudgetPolicy):
            return self.method.make_budget_policy(self.net)
        return FULL_NETWORK

    @cached_property
    def _selector(self) -> SelectsSubnets | None:
        return self.method if isinstance(self.method, SelectsSubnets) else None

    @cached_property
    def _coster(self) -> HasStepCost | None:
        return self.method if isinstance(self.method, HasStepCost) else None

    @cached_property
    def memory_bounds(self) -> MemoryBounds:
        """Return the most memory that a step needs at each row; one for all if it is not known."""
        if isinstance(self.method, BoundsFilters):
            return bound_memory(self.net, self.method.max_filters(self.net))
        return bound_memory(self.net, np.array([self.net.sizes], np.int64))

    def find_fitting_rows(self, costs: DeviceCosts, devices: IntArray) -> BoolArray | None:
        """Return the rows whose steps fit in each device's memory; None if none is limited.

        The result is (device, row), or (device, 1) if the memory of rows is not known. Each device
        needs room for its largest mini-batch.
        """
        if np.isinf(costs.memory).all():
            return None
        batch = np.array([self.plan_work(device).sizes[0] for device in devices.tolist()])
        step_bytes = self.memory_bounds.step_bytes(self.method.local.optimiser, batch)
        return np.asarray(step_bytes <= costs.memory[:, None])

    def select_subnet(self, row: int, key: TaskKey, step: int) -> Subnet:
        """Return the subnet that a step trains."""
        if self._selector is None:
            return self.net.full
        return self._selector.select_subnet(self.net, row, key, step)

    def step_macs(self, row: int, key: TaskKey, step: int) -> float:
        """Return the MACs per sample of a training step."""
        if self._coster is not None:
            return self._coster.macs(self.net, row, key, step)
        subnet = self.select_subnet(row, key, step)
        return self.full_macs if subnet is self.net.full else self.net.macs(subnet, training=True)

    @cached_property
    def _counter(self) -> CountsFilters | None:
        """Return the method if the costs of its steps follow from the numbers of filters."""
        is_known = self._coster is None and make_count_costs(self.net) is not None
        return self.method if is_known and isinstance(self.method, CountsFilters) else None

    def count_step_macs(self, rows: IntArray, keys: TaskKeys, step: int) -> FloatArray:
        """Return the MACs per sample of one training step of several tasks."""
        if self._selector is None and self._coster is None:
            return np.full(len(rows), self.full_macs)
        costs = make_count_costs(self.net)
        if self._counter is not None and costs is not None:
            return costs.macs(self._counter.count_filters(self.net, rows, keys, step))
        tasks = [TaskKey(keys.seed, keys.round, device) for device in keys.devices.tolist()]
        macs = [self.step_macs(*task, step) for task in zip(rows.tolist(), tasks, strict=True)]
        return np.array(macs)

    def count_sent_bytes(self, params: Params, rows: IntArray, keys: TaskKeys) -> FloatArray:
        """Return the bytes that each device is sent: the network or a packed subnet."""
        sent = np.full(len(rows), float(nbytes(params)))
        if not isinstance(self.method, SendsSubnets):
            return sent
        costs = make_count_costs(self.net)
        for index, device in enumerate(keys.devices.tolist()):
            key = TaskKey(keys.seed, keys.round, device)
            subnet = self.subnet_to_send(int(rows[index]), key)
            if subnet is None:
                continue
            if self._counter is not None and costs is not None:  # then all are sent subnets
                return costs.nbytes(self._counter.count_filters(self.net, rows, keys, 0))
            sent[index] = self.net.count_bytes(params, subnet)
        return sent

    def subnet_to_send(self, row: int, key: TaskKey) -> Subnet | None:
        """Return the subnet that a device is sent, or None for the full network."""
        if isinstance(self.method, SendsSubnets):
            return self.method.subnet_to_send(self.net, row, key)
        return None

    def train(self, task: Task, steps: Iterable[Step]) -> Update:
        """Train on a device."""
        method = self.method
        if task.device_state is None:
            task = replace(task, device_state=init_device_state(method, task.params))
        if isinstance(method, Trains):
            return method.train(self.net, task, steps)
        return train_locally(self.net, task, steps, method.local.optimiser)

    @property
    def merges_stream(self) -> bool:
        """Return whether updates can be merged as they come."""
        method = self.method
        if isinstance(method, Merges):
            return isinstance(method, MergesStream) and method.merges_stream
        return True

    def merge(self, state: Any, updates: Sequence[Update] | UpdateStream) -> Any:
        """Return the server's next state."""
        if isinstance(self.method, Merges):
            merge: Any = self.method.merge  # takes a stream only if `merges_stream`
            return merge(self.net, state, updates)
        stream = open_stream(updates)
        delta = average_deltas(self.net, state.params, stream, weight_by("samples"))
        return replace(state, params=apply_delta(state.params, delta)) if stream.seen else state

    def broadcast(self, state: Any) -> Params:
        """Return what devices are sent along with the network."""
        return self.method.broadcast(state) if isinstance(self.method, Broadcasts) else {}


def list_batch_sizes(samples: int, local: LocalTraining) -> tuple[int, ...]:
    """Return the sizes of the mini-batches in one epoch over these samples."""
    count = count_batches(samples, local.batch, drop_short=local.drop_short)
    return tuple(min(local.batch, samples - index * local.batch) for index in range(count))


def build_context(
    net: nn.Module,
    data: FederatedData,
    method: Method,
    options: ElasticOptions | None = None,
    *,
    check: bool = True,
) -> WorkerContext:
    """Make a network elastic for its data and method, and check it unless that was done before."""
    options, example = options or ElasticOptions(), make_example_input(data)
    elastic_net = elastic(net, example, coupled=options.coupled, hidden=options.hidden, check=check)
    if isinstance(method, SelectsSubnets) and not elastic_net.sites:
        advice = "" if options.hidden else "; `hidden = true` makes hidden linear layers such"
        raise ValueError(
            f"Expected a network with layers that {type(method).__name__} can narrow, "
            f"found none{advice}"
        )
    return WorkerContext(elastic_net, data, method)


def build_worker_context(
    make_inputs: InputFactory, method: Method, options: ElasticOptions
) -> WorkerContext:
    """Build the context of a worker from its own copy of the inputs."""
    return build_context(*make_inputs(), method, options, check=False)  # by the main process


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
    steps = iter_steps(context, job.key, planned.__getitem__)
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
    context: WorkerContext, key: TaskKey, choose: Callable[[int], RowAndMacs | None]
) -> Iterator[Step]:
    """Yield mini-batches with their subnets; `choose` is called for each one as it is requested."""
    local, share = context.method.local, context.get_share(key.device)
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
    number = 0
    while (choice := choose(number)) is not None:
        row, macs = choice
        x, y = next(batches)
        yield Step(x, y, context.select_subnet(row, key, number), macs)
        number += 1


def redraw_subnets(
    context: WorkerContext, key: TaskKey, rows: Sequence[int], extra: Params
) -> SubnetSteps:
    """Return the subnets of the steps as runs of (subnet, number of steps).

    `extra` holds the tensors sent along with the network, by which some methods choose filters.
    """
    method, net = context.method, context.net
    by_counts: dict[tuple[int, ...], Subnet] = {}
    subnets: list[Subnet] = []
    for step, row in enumerate(rows):
        subnet = context.select_subnet(row, key, step)
        if isinstance(method, SelectsFilters):
            if subnet.counts not in by_counts:
                by_counts[subnet.counts] = method.select_filters(net, subnet, extra, key)
            subnet = by_counts[subnet.counts]
        subnets.append(subnet)
    return count_steps(subnets)
