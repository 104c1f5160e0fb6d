"""The network, data and method of a run, and what a step of a task trains and costs."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from torch import nn

from pliant.data import AS_IS, FederatedData, InputScale
from pliant.devices import FULL_NETWORK, BudgetPolicy, PerBatch, PerDevice, PerRound
from pliant.devices.vector_rng import FloatArray, IntArray
from pliant.engine.round_tasks import LocalWork, list_batch_sizes
from pliant.methods.aggregation import (
    MergesStream,
    UpdateStream,
    apply_delta,
    average_deltas,
    open_stream,
    weight_by,
)
from pliant.methods.base import Step, Task, TaskKey, Update, train_locally
from pliant.methods.state import init_device_state
from pliant.methods.verbs import (
    BoundsFilters,
    Broadcasts,
    CountsFilters,
    Distils,
    FreezesLayers,
    HasBudgetPolicy,
    HasDeviceState,
    HasExtraUpload,
    HasStepCost,
    LimitsRows,
    Merges,
    Method,
    NeedsClasses,
    ScalesInputs,
    ScalesLr,
    SelectsFilters,
    SelectsSubnets,
    SendsSubnets,
    SharesPredictions,
    Trains,
    TrainsPart,
)
from pliant.nn.elastic import Elastic, elastic
from pliant.nn.filter_counts import make_count_costs
from pliant.nn.frozen_cost import count_unfrozen_macs
from pliant.nn.memory import MemoryBounds, bound_memory
from pliant.nn.sites import ElasticOptions
from pliant.nn.subnet import Subnet
from pliant.params import Params
from pliant.table_search.step_time import StepTimeModel

SLOWNESS_DRAWS = 8  # of the filters of a row

InputFactory = Callable[[], tuple[nn.Module, FederatedData]]


@dataclass(frozen=True, eq=False)
class WorkerContext:
    """The network, data and method of a run, as its workers, devices and server hold them."""

    net: Elastic
    data: FederatedData
    method: Method
    step_time: StepTimeModel | None = None  # of simulated devices

    @cached_property
    def full_macs(self) -> float:
        """Return the MACs per sample of a training step of the full network."""
        return self.net.macs(self.net.full, training=True)

    @cached_property
    def _data_summaries(self) -> dict[tuple[int, int], tuple[int, tuple[int, ...]]]:
        return {}

    @cached_property
    def _work(self) -> dict[int, LocalWork]:  # by number of samples
        return {}

    def count_samples(self, device: int, now: float | None = None) -> int:
        """Return how many samples a device has at a virtual time; in the end, without one."""
        return self.data.count_samples(device % len(self.data), now)

    def summarise_data(self, device: int, now: float | None = None) -> tuple[int, tuple[int, ...]]:
        """Return the number of samples on a device at a time, and their classes."""
        key = device % len(self.data), self.count_samples(device, now)
        if key not in self._data_summaries:
            self._data_summaries[key] = key[1], self.data.list_classes(*key)
        return self._data_summaries[key]

    def plan_work(self, device: int, samples: int | None = None) -> LocalWork:
        """Return the mini-batches of a device's task, on its first samples or on all."""
        samples, local = samples or self.count_samples(device), self.method.local
        if samples not in self._work:
            sizes = list_batch_sizes(samples, local) * local.epochs
            self._work[samples] = LocalWork(sizes, self.full_macs)
        return self._work[samples]

    def compute_batch_sizes(self, devices: IntArray, now: float | None = None) -> FloatArray:
        """Return the samples of each mini-batch of tasks sent at a time, as (device, step)."""
        sizes = [
            self.plan_work(device, self.count_samples(device, now)).sizes
            for device in devices.tolist()
        ]
        longest = max(map(len, sizes), default=1)  # there may be no devices
        padded = [row + (0,) * (longest - len(row)) for row in sizes]
        return np.array(padded, np.float64).reshape(len(sizes), longest)

    # What a method leaves out is what FedAvg does. What every round, task or step needs is checked
    # once: isinstance with a protocol takes longer than the rest of a step's cost.

    @cached_property
    def budget_policy(self) -> BudgetPolicy:
        """Return the policy by which devices choose the cost of each mini-batch."""
        policy, factors = self._own_policy, self.slowness
        if factors is None or policy is FULL_NETWORK or not isinstance(policy, PerBatch | PerRound):
            return policy
        times = policy.rows.share_array * factors
        return replace(policy, rows=replace(policy.rows, times=tuple(times.tolist())))

    @cached_property
    def _own_policy(self) -> BudgetPolicy:
        if isinstance(self.method, HasBudgetPolicy):
            return self.method.make_budget_policy(self.net)
        return FULL_NETWORK

    @cached_property
    def slowness(self) -> FloatArray | None:
        """Return how many times longer steps take than their MACs say, by row; None: as long."""
        if self.step_time is None:
            return None
        policy = self._own_policy
        if not isinstance(policy, PerBatch | PerRound | PerDevice):
            raise ValueError(
                "Expected a PerBatch, PerRound or PerDevice policy for `step_time`, got "
                f"{type(policy).__name__}"
            )
        rows = range(len(policy.rows.shares))
        return np.array([self._compute_slowness(self.step_time, row) for row in rows])

    def _compute_slowness(self, model: StepTimeModel, row: int) -> float:
        """Return the time of a row's steps over that of the full network at the same MACs.

        The full network's is that of the model's mini-batch. Random filters are drawn a few times.
        """
        full = model.predict_seconds(self.net, self.net.full) / (model.batch * self.full_macs)
        net, scale, batch = self.net_at(row), self.scale_inputs(row), self.method.local.batch
        samples, seconds, macs = scale.count_samples(batch), 0.0, 0.0
        for number in range(SLOWNESS_DRAWS):
            subnet = self.select_subnet(row, TaskKey(0, number, 0), 0)
            seconds += model.predict_seconds(net, subnet, batch_share=samples / model.batch)
            macs += samples * net.macs(subnet, training=True)
        if (unfrozen := self.count_frozen_macs(row)) is not None:  # all activations are charged
            saved = macs - SLOWNESS_DRAWS * samples * unfrozen
            macs, seconds = macs - saved, seconds - model.per_mac * saved
        return seconds / macs / full

    def limit_row(self, state: Any, progress: float) -> int | None:
        """Return the last row that devices may choose in a round; None: they may choose any."""
        return None if self._limiter is None else self._limiter.limit_row(self.net, state, progress)

    def scale_lr(self, state: Any, device: int) -> float:
        """Return the factor of a device's learning rate."""
        return 1.0 if self._lr_scaler is None else self._lr_scaler.scale_lr(state, device)

    @cached_property
    def _lr_scaler(self) -> ScalesLr | None:
        return self.method if isinstance(self.method, ScalesLr) else None

    def limit_budget(self, last_row: int | None) -> BudgetPolicy:
        """Return the policy of a round with this last row."""
        policy = self.budget_policy
        return replace(policy, last_row=last_row) if isinstance(policy, PerBatch) else policy

    def find_max_share(self, last_row: int | None) -> float:
        """Return the largest share of the full network's MACs that a step may cost."""
        policy = self.budget_policy
        if last_row is None or not isinstance(policy, PerBatch):
            return 1.0
        return max(policy.rows.shares[: last_row + 1])

    @property
    def open_passes(self) -> int:
        """Return the most passes over a device's data if it does as many steps as fit, else 0."""
        return 0 if self._limiter is None else self.method.local.epochs

    @property
    def needs_classes(self) -> bool:
        """Return whether devices must tell which classes they have."""
        return isinstance(self.method, NeedsClasses) and self.method.needs_classes

    @property
    def scales_inputs(self) -> bool:
        """Return whether steps may train on smaller images or mini-batches."""
        return self.input_scaler is not None

    @cached_property
    def input_scaler(self) -> ScalesInputs | None:
        """Return the method if any of its rows shrinks a mini-batch."""
        method = self.method
        if not isinstance(method, ScalesInputs):
            return None
        scales = [method.scale_inputs(self.net, row) for row in self._rows]
        return None if scales and all(scale == AS_IS for scale in scales) else method

    @property
    def _rows(self) -> range:
        """Return the rows that devices choose from; none if the policy does not say."""
        policy = self._own_policy
        return range(len(policy.rows.shares) if isinstance(policy, PerBatch | PerRound) else 0)

    def check_image_sizes(self) -> None:
        """Raise if the network cannot run at the image size of a row."""
        for row in self._rows:
            self.net_at(row)

    def scale_inputs(self, row: int) -> InputScale:
        """Return how a step shrinks its mini-batch."""
        if self.input_scaler is None:
            return AS_IS
        return self.input_scaler.scale_inputs(self.net, row)

    def net_at(self, row: int) -> Elastic:
        """Return the network for the image size of this row's steps."""
        side = self.scale_inputs(row).side
        return self.net if side is None else self.net.at(side, side)

    @cached_property
    def _limiter(self) -> LimitsRows | None:
        return self.method if isinstance(self.method, LimitsRows) else None

    @cached_property
    def subnet_selector(self) -> SelectsSubnets | None:
        """Return the method if its steps train subnets."""
        return self.method if isinstance(self.method, SelectsSubnets) else None

    @cached_property
    def step_coster(self) -> HasStepCost | None:
        """Return the method if it counts the cost of its steps itself."""
        return self.method if isinstance(self.method, HasStepCost) else None

    def list_frozen(self, row: int) -> frozenset[str]:
        """Return the parameters that the steps of a row leave as they are."""
        own = self.method
        return own.list_frozen(self.net, row) if isinstance(own, FreezesLayers) else frozenset()

    def count_frozen_macs(self, row: int) -> float | None:
        """Return the MACs per sample of a row's steps if they leave some layers frozen."""
        frozen = self.list_frozen(row)
        return count_unfrozen_macs(self.net_at(row), frozen) if frozen else None

    @property
    def trains_full_network(self) -> bool:
        """Return whether every step trains the full network on a whole mini-batch, once."""
        return not any((self.subnet_selector, self.step_coster, self.input_scaler))

    @property
    def sends_subnets(self) -> bool:
        """Return whether devices may be sent a subnet instead of the full network."""
        return self.subnet_sender is not None

    @cached_property
    def subnet_sender(self) -> SendsSubnets | None:
        """Return the method if devices may be sent a subnet."""
        return self.method if isinstance(self.method, SendsSubnets) else None

    @cached_property
    def predictor(self) -> SharesPredictions | None:
        """Return the method if devices share predictions instead of networks."""
        return self.method if isinstance(self.method, SharesPredictions) else None

    @cached_property
    def part_trainer(self) -> TrainsPart | None:
        """Return the method if it trains only a part of the network at first."""
        return self.method if isinstance(self.method, TrainsPart) else None

    @cached_property
    def _train(self) -> Callable[[Elastic, Task, Iterable[Step]], Update]:
        if self.predictor is not None:
            return partial(self.predictor.train_with_proxy, images=self.data.proxy)
        if isinstance(self.method, Trains):
            return self.method.train
        return partial(train_locally, optimiser=self.method.local.optimiser)

    @cached_property
    def filter_selector(self) -> SelectsFilters | None:
        """Return the method if it selects the filters of subnets by what devices are sent."""
        return self.method if isinstance(self.method, SelectsFilters) else None

    @cached_property
    def memory_bounds(self) -> MemoryBounds:
        """Return the most memory that a step needs at each row; one for all if it is not known."""
        if isinstance(self.method, BoundsFilters):
            return bound_memory(self.net, self.method.max_filters(self.net))
        return bound_memory(self.net, np.array([self.net.sizes], np.int64))

    def select_subnet(self, row: int, key: TaskKey, step: int) -> Subnet:
        """Return the subnet that a step trains."""
        if self.subnet_selector is None:
            return self.net.full
        return self.subnet_selector.select_subnet(self.net, row, key, step)

    def step_macs(self, row: int, key: TaskKey, step: int) -> float:
        """Return the MACs per sample of a training step."""
        if self.step_coster is not None:
            return self.step_coster.macs(self.net, row, key, step)
        if (macs := self.count_frozen_macs(row)) is not None:
            return macs
        subnet, net = self.select_subnet(row, key, step), self.net_at(row)
        if subnet is self.net.full and net is self.net:
            return self.full_macs
        return net.macs(subnet, training=True)

    def batch_macs(self, row: int, size: int, key: TaskKey, step: int) -> float:
        """Return the MACs of a training step on its part of a mini-batch of this size."""
        return self.scale_inputs(row).count_samples(size) * self.step_macs(row, key, step)

    @cached_property
    def filter_counter(self) -> CountsFilters | None:
        """Return the method if the costs of its steps follow from the numbers of filters."""
        is_known = self.step_coster is None and make_count_costs(self.net) is not None
        return self.method if is_known and isinstance(self.method, CountsFilters) else None

    def subnet_to_send(self, row: int, key: TaskKey) -> Subnet | None:
        """Return the subnet that a device is sent, or None for the full network."""
        sender = self.subnet_sender
        return None if sender is None else sender.subnet_to_send(self.net, row, key)

    def train(self, task: Task, steps: Iterable[Step]) -> Update:
        """Train on a device."""
        if task.device_state is None and isinstance(self.method, HasDeviceState):
            task = replace(task, device_state=init_device_state(self.method, task.params))
        return self._train(self.net, task, steps)

    @cached_property
    def _merger(self) -> Any:  # a `Merges`, which takes a stream only if `merges_stream`
        return self.method if isinstance(self.method, Merges) else None

    @cached_property
    def merges_stream(self) -> bool:
        """Return whether updates can be merged as they come."""
        method = self.method
        if isinstance(method, Merges):
            return isinstance(method, MergesStream) and method.merges_stream
        return True

    def merge(self, state: Any, updates: Sequence[Update] | UpdateStream) -> Any:
        """Return the server's next state."""
        if self._merger is not None:
            return self._merger.merge(self.net, state, updates)
        stream = open_stream(updates)
        delta = average_deltas(self.net, state.params, stream, weight_by("samples"))
        return replace(state, params=apply_delta(state.params, delta)) if stream.seen else state

    @cached_property
    def distiller(self) -> Distils | None:
        """Return the method if it trains the merged network on proxy images."""
        return self.method if isinstance(self.method, Distils) else None

    def broadcast(self, state: Any) -> Params:
        """Return what devices are sent along with the network."""
        return self.method.broadcast(state) if isinstance(self.method, Broadcasts) else {}

    @cached_property
    def extra_upload_bytes(self) -> int:
        """Return how many bytes a device uploads on top of its delta."""
        method = self.method
        return method.extra_upload_bytes(self.net) if isinstance(method, HasExtraUpload) else 0


def build_context(
    net: nn.Module,
    data: FederatedData,
    method: Method,
    options: ElasticOptions | None = None,
    *,
    check: bool = True,
    step_time: StepTimeModel | None = None,
) -> WorkerContext:
    """Make a network elastic for its data and method, and check it unless that was done before."""
    options, example = options or ElasticOptions(), data.make_example()
    elastic_net = elastic(net, example, coupled=options.coupled, hidden=options.hidden, check=check)
    if isinstance(method, SelectsSubnets) and not elastic_net.sites:
        advice = "" if options.hidden else "; `hidden = true` makes hidden linear layers such"
        raise ValueError(
            f"Expected a network with layers that {type(method).__name__} can narrow, "
            f"found none{advice}"
        )
    return WorkerContext(elastic_net, data, method, step_time)


def build_worker_context(
    make_inputs: InputFactory, method: Method, options: ElasticOptions
) -> WorkerContext:
    """Build the context of a worker from its own copy of the inputs."""
    return build_context(*make_inputs(), method, options, check=False)  # by the main process
