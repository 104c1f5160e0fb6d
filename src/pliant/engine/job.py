"""Jobs: what a worker needs to know to train one task; pure, so that it can run anywhere."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from pliant.data import Federated, batches
from pliant.methods.base import Method, Place, Step, Task, Update
from pliant.nn.elastic import Elastic, elastic
from pliant.params import Params


@dataclass(frozen=True, eq=False)
class World:
    """What stays resident in a worker: the network, the data and the method."""

    net: Elastic
    data: Federated
    method: Method


EXTRA = "extra/"  # in front of the names of what is sent beside the network

Source = Callable[[], tuple[nn.Module, Federated]]


def build_world(source: Source, method: Method) -> World:
    """Make what stays resident in a worker."""
    net, data = source()
    return World(elastic(net, example_of(data)), data, method)


def example_of(data: Federated) -> Tensor:
    """Return an input that shows the network its shape."""
    return data.train.normalised(slice(0, 1))


@dataclass(frozen=True)
class Job:
    """One device's training in one round: the rows of its steps, and what it remembers."""

    place: Place
    rows: tuple[int, ...]
    macs: tuple[float, ...]  # expected, of each step
    lr: float
    memory: Params
    owned: int = 0  # samples that the device has
    classes: tuple[int, ...] = ()  # of these samples

    @property
    def cost(self) -> float:
        """Return how much there is to do."""
        return sum(self.macs)


def perform(world: World, shared: Params, job: Job) -> Update:
    """Train one task; `shared` is the server's network and, by a prefix, what else it sends."""
    task = sent(world.method, world.net, shared, job)
    return world.method.train(world.net, task, steps(world, job))


def sent(method: Method, net: Elastic, shared: Params, job: Job) -> Task:
    """Return what the device of a job is sent."""
    params = {name: tensor for name, tensor in shared.items() if not name.startswith(EXTRA)}
    extra = {
        name.removeprefix(EXTRA): tensor
        for name, tensor in shared.items()
        if name.startswith(EXTRA)
    }
    packed = method.sends(net, job.rows[0], job.place)
    return Task(
        job.place,
        params if packed is None else net.take(params, packed),
        job.lr,
        packed,
        extra,
        job.memory,
        job.owned,
        job.classes,
    )


def steps(world: World, job: Job) -> Iterator[Step]:
    """Yield the mini-batches of a job with their subnets."""
    local, place = world.method.local, job.place
    share = world.data.devices[place.device % len(world.data)]
    each = -(-len(share) // local.batch)
    for number, (row, macs) in enumerate(zip(job.rows, job.macs, strict=True)):
        epoch, place_in = divmod(number, each)
        if place_in == 0:
            order = batches(
                world.data.train, share, local.batch, place.seed, place.round, place.device, epoch
            )
        x, y = order[place_in]
        yield Step(x, y, world.method.subnet(world.net, row, place, number), macs)
