"""What a federated method may define: one required field, and optional verbs."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from pliant.data import ImageDataset, InputScale
from pliant.devices import BudgetPolicy
from pliant.devices.vector_rng import IntArray
from pliant.methods.base import LocalTraining, Step, Task, TaskKey, TaskKeys, Update
from pliant.nn.elastic import Elastic
from pliant.nn.subnet import Subnet
from pliant.params import Params


class Method(Protocol):
    """A federated method: its device half and its server half, as one value.

    Only `local` is required. What a method leaves out is what FedAvg does: the optional verbs
    below, each a protocol of its own, say what they replace.
    """

    @property
    def local(self) -> LocalTraining: ...


@runtime_checkable
class HasBudgetPolicy(Protocol):
    """By default every mini-batch costs as much as the full network."""

    def make_budget_policy(self, net: Elastic) -> BudgetPolicy:
        """Return the policy by which devices choose a row, and so the cost, of each mini-batch."""


@runtime_checkable
class LimitsRows(Protocol):
    """By default devices choose among all rows in every round.

    The epochs of a method that limits rows are a maximum: its devices do as many steps as fit.
    """

    def limit_row(self, net: Elastic, state: Any, progress: float) -> int:
        """Return the last row of the next round, `progress` (0 to 1) of the way through the run."""


@runtime_checkable
class ScalesInputs(Protocol):
    """By default every step trains on whole mini-batches of images as they are."""

    def scale_inputs(self, net: Elastic, row: int) -> InputScale:
        """Return how a step at this row shrinks its mini-batch."""


@runtime_checkable
class SelectsSubnets(Protocol):
    """By default every step trains the full network."""

    def select_subnet(self, net: Elastic, row: int, key: TaskKey, step: int) -> Subnet:
        """Return the subnet that a step at this row trains."""


@runtime_checkable
class SendsSubnets(Protocol):
    """By default devices are sent the full network."""

    def subnet_to_send(self, net: Elastic, row: int, key: TaskKey) -> Subnet | None:
        """Return the subnet that a device is sent, or None for the full network."""


@runtime_checkable
class Trains(Protocol):
    """By default devices train with `train_locally`."""

    def train(self, net: Elastic, task: Task, steps: Iterable[Step]) -> Update:
        """Train on a device."""


@runtime_checkable
class Merges(Protocol):
    """By default the server adds the mean delta, weighted by samples."""

    def merge(self, net: Elastic, state: Any, updates: Sequence[Update]) -> Any:
        """Return the server's next state; the order of updates must not matter."""


@runtime_checkable
class Distils(Protocol):
    """By default the network of a round is the merged one."""

    def distil(
        self,
        net: Elastic,
        before: Params,
        merged: Params,
        updates: Sequence[Update],
        images: ImageDataset,
        rng: np.random.Generator,
    ) -> Params:
        """Return the network after training on proxy images, given it before and after merging."""


@runtime_checkable
class HasServerCost(Protocol):
    """By default the server's work on a round is not counted."""

    def server_macs(self, net: Elastic, updates: Sequence[Update], proxy_images: int) -> float:
        """Return the MACs of the server after a round; they take no virtual time."""


@runtime_checkable
class SharesPredictions(Protocol):
    """By default devices are sent the network and return its change.

    With these verbs they are sent no network, and return no delta: each has a network of its own,
    and learns what others predict on proxy images. In `train_with_proxy`, `task.params` is empty.
    """

    @property
    def proxy_images(self) -> int:
        """Return how many proxy images devices need."""

    def train_with_proxy(
        self, net: Elastic, task: Task, steps: Iterable[Step], images: ImageDataset
    ) -> Update:
        """Train on a device that has the proxy images."""

    def proxy_macs(self, net: Elastic, state: Any, row: int) -> float:
        """Return the MACs that a task spends on proxy images, charged to its first step."""


@runtime_checkable
class TrainsPart(Protocol):
    """By default rounds train the network as a whole, and it is scored as a whole."""

    def select_trained(self, net: Elastic, state: Any, last_row: int | None) -> Elastic:
        """Return the part of the network to score after a round with this last row, if any."""


@runtime_checkable
class TrainsOwnPart(Protocol):
    """By default the part that devices use themselves is the one that is scored."""

    def select_own(self, net: Elastic, update: Update) -> Elastic:
        """Return the part of the network that a device has just trained."""


@runtime_checkable
class HasServerState(Protocol):
    """By default the server's state is a `ServerState`."""

    def init_state(self, params: Params) -> Any:
        """Return the state before the first round."""


@runtime_checkable
class HasDeviceState(Protocol):
    """By default devices keep nothing between rounds."""

    def init_device_state(self, params: Params) -> Any:
        """Return what a device keeps before its first task, as a frozen dataclass."""


@runtime_checkable
class Personalises(Protocol):
    """By default a device's own network is the one it has just trained."""

    def personalise(self, params: Params, device_state: Any) -> Params:
        """Return a device's own network, given the shared one and what the device keeps."""


@runtime_checkable
class Broadcasts(Protocol):
    """By default devices are sent nothing but the network."""

    def broadcast(self, state: Any) -> Params:
        """Return what devices are sent along with the network."""


@runtime_checkable
class HasExtraUpload(Protocol):
    """By default devices upload their delta only."""

    def extra_upload_bytes(self, net: Elastic) -> int:
        """Return how many bytes a device uploads on top of its delta."""


@runtime_checkable
class HasStepCost(Protocol):
    """By default a step costs one pass of its subnet, forward and backward."""

    def macs(self, net: Elastic, row: int, key: TaskKey, step: int) -> float:
        """Return the MACs per sample of a step, forward and backward."""


@runtime_checkable
class FreezesLayers(Protocol):
    """By default a step trains every parameter of its subnet."""

    def list_frozen(self, net: Elastic, row: int) -> frozenset[str]:
        """Return the parameters that the steps of a row leave as they are; they train no subnet."""


@runtime_checkable
class CountsFilters(Protocol):
    """By default the engine selects the subnet of every step to find its cost."""

    def count_filters(self, net: Elastic, rows: IntArray, keys: TaskKeys, step: int) -> IntArray:
        """Return how many filters each site keeps in one step of several tasks: (task, site)."""


@runtime_checkable
class BoundsFilters(Protocol):
    """By default any row may need the memory of the full network."""

    def max_filters(self, net: Elastic) -> IntArray:
        """Return the most filters that each site may keep in a step at each row: (row, site)."""


@runtime_checkable
class SelectsFilters(Protocol):
    """By default the server knows which filters a device trains."""

    def select_filters(self, net: Elastic, subnet: Subnet, extra: Params, key: TaskKey) -> Subnet:
        """Return a subnet of the same size, selected by the `extra` that the device was sent."""


@runtime_checkable
class ScalesLr(Protocol):
    """By default all devices train with the same learning rate."""

    def scale_lr(self, state: Any, device: int) -> float:
        """Return the factor of a device's learning rate, given the server's state."""


# The work of an asynchronous task: all its mini-batches, or those until the deadline.
Work = Literal["pass", "seconds"]


@runtime_checkable
class RunsAsynchronously(Protocol):
    """By default devices train in rounds.

    With these fields, `concurrency` tasks are in flight at any time, or `per_round` if it is None,
    and the server merges whenever it has `buffer` updates, whose `staleness` it knows.
    """

    @property
    def concurrency(self) -> int | None: ...
    @property
    def buffer(self) -> int: ...
    @property
    def work(self) -> Work: ...


@runtime_checkable
class WrapsMethod(Protocol):
    """By default a method takes its own steps and merges the updates as they are."""

    @property
    def inner(self) -> Method: ...

    def discount(self, net: Elastic, params: Params, update: Update) -> Update:
        """Return the update that the inner method merges into these parameters."""


def get_inner_method(method: Method) -> Method:
    """Return the method whose steps devices take and which merges: the inner one, if any."""
    return method.inner if isinstance(method, WrapsMethod) else method


@runtime_checkable
class DependsOnFleet(Protocol):
    """By default a method does not depend on the number of devices."""

    def fit_fleet(self, size: int) -> Method:
        """Return the method for a fleet of this size."""


@runtime_checkable
class NeedsClasses(Protocol):
    """By default a method works with devices that do not tell which classes they have."""

    @property
    def needs_classes(self) -> bool:
        """Return whether devices must tell which classes they have."""
