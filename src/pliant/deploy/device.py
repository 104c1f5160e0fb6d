"""A live device: it builds what the server describes once, and trains what it is asked to."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from pliant.data import batches
from pliant.deploy.calibrate import calibrated, example_batch, keep, points_of
from pliant.deploy.curve import Curve
from pliant.deploy.host import Limits, allowed_share, expected_slowdown, hints, refusal
from pliant.deploy.keepsake import Keepsakes
from pliant.deploy.letters import CHANGE, EXTRA, PARAMS, Answer, Order, Pace, packed, read_order
from pliant.deploy.owed import shortened
from pliant.deploy.pace import LivePace, Work, work_of
from pliant.deploy.rehearsal import FleetPace
from pliant.engine.job import World, example_of
from pliant.experiment import Experiment, build
from pliant.methods.base import Place, Step, Task, Update
from pliant.nn.elastic import elastic
from pliant.own import is_own
from pliant.value import decode

HAND_OVER = 0.1  # seconds that encoding an answer takes, until it was measured


@dataclass
class Resident:
    """What stays in memory between rounds."""

    key: str
    pace: Pace
    experiment: Experiment
    world: World
    full: float  # MACs of a training step at full width, per sample
    curves: dict[int, Curve] = field(default_factory=dict)  # by device
    slowdown: float | None = None  # at the end of the last round, if there was one


class Device:
    """Answer orders, one after another."""

    def __init__(
        self,
        number: int,
        folder: Path,
        limits: Limits,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._number = number
        self._folder = folder
        self._limits = limits
        self._clock = clock
        self._sleep = sleep
        self._hand_over = HAND_OVER
        self._resident: Resident | None = None

    def answer(self, raw: bytes, queued: float = 0.0) -> bytes:
        """Do what an order says; its time begins when all that it needs is there.

        `queued` is how long it has waited for the end of an older order: that time is gone.
        """
        order, tensors = read_order(raw)
        order = msgspec.structs.replace(order, device=self._number)
        try:
            reason = refusal(self._limits, hints())
            if reason is not None:
                return packed(Answer("declined", order.device, order.round, reason))
            resident = self._built(order.experiment, order.pace)
            curve = self._curve(resident, order.device)
            if order.kind == "hello":
                now = curve.slowed(resident.slowdown or expected_slowdown(self._limits, hints()))
                return packed(Answer("hello", order.device, curve=points_of(now)))
            return self._trained(resident, order, tensors, self._clock() - queued)
        except Exception as error:  # the server goes on without this device
            reason = f"{type(error).__name__}: {error}"
            return packed(Answer("failed", order.device, order.round, reason))

    def _built(self, described: Any, pace: Pace) -> Resident:
        key = sha256(msgspec.json.encode(described)).hexdigest()[:16]
        if self._resident is None or (self._resident.key, self._resident.pace) != (key, pace):
            experiment = decode(local(described, self._limits, pace), Experiment)
            net, data = build(experiment)
            world = World(elastic(net, example_of(data)), data, experiment.federated)
            full = world.net.macs(world.net.full, training=True)
            self._resident = Resident(key, pace, experiment, world, full)
        return self._resident

    def _curve(self, resident: Resident, device: int) -> Curve:
        """Return how long mini-batches take here when nothing else runs."""
        if device not in resident.curves:
            world, batch = resident.world, resident.world.method.local.batch
            own = world.data.train.subset(world.data.devices[device % len(world.data)][:batch])
            x, y = example_batch(own.normalised(), own.labels, batch)
            resident.curves[device] = calibrated(world.net, x, y, self._folder)
        return resident.curves[device]

    def _trained(
        self, resident: Resident, order: Order, tensors: dict[str, Any], arrived: float
    ) -> bytes:
        world, experiment = resident.world, resident.experiment
        place = Place(experiment.seed, order.round, order.device)
        share = world.data.devices[order.device % len(world.data)]
        work = work_of(len(share), world.method.local, resident.full)
        keepsakes = Keepsakes(self._folder / resident.key)
        memory, owed = keepsakes.recall(order.merged)
        row = 0 if order.row is None else order.row
        task = Task(
            place,
            tensors.get(PARAMS, {}),
            order.lr,
            world.method.sends(world.net, row, place),
            tensors.get(EXTRA, {}),
            memory,
            len(share),
            tuple(np.unique(world.data.train.labels.numpy()[share]).tolist()),
        )
        pace = self._pace(resident, order, work, arrived)
        update = world.method.train(world.net, task, steps(world, place, pace))
        late = experiment.rules.late == "discard" and update.steps < len(work.sizes)
        if isinstance(pace, LivePace):
            resident.slowdown = pace.slowdown
            curve = resident.curves[order.device] = pace.learnt()
            keep(curve, world.net, world.method.local.batch, self._folder)
        if not update.steps or late:
            update, sent = _nothing(update), {}
        else:
            change, owed = shortened(world.net, update, order.squeeze, owed)
            keepsakes.keep(order.round, update.memory, owed)
            sent = {CHANGE: change, EXTRA: update.extra}
        began = self._clock()
        answer = Answer(
            "update" if update.steps else "late",
            order.device,
            order.round,
            rows=tuple(pace.rows),
            times=tuple(pace.times),
            seconds=began - arrived,
            samples=update.samples,
            macs=update.macs,
            loss=update.loss,
            owned=update.owned,
            short=pace.short,
            curve=points_of(self._curve(resident, order.device).slowed(resident.slowdown or 1.0)),
        )
        raw = packed(answer, sent)
        self._hand_over = self._clock() - began
        return raw

    def _pace(
        self, resident: Resident, order: Order, work: Work, arrived: float
    ) -> "LivePace | FleetPace":
        def clock() -> float:
            return self._clock() - arrived

        if order.pace == "fleet":
            return FleetPace(resident.world, resident.experiment, order, work, clock)
        found = hints()
        return LivePace(
            resident.world.method.plan(resident.world.net),
            work,
            self._curve(resident, order.device),
            seconds=order.seconds - self._hand_over,
            clock=clock,
            held=None if order.row is None else (order.row, order.macs),
            slowdown=resident.slowdown or expected_slowdown(self._limits, found),
            is_partial=resident.experiment.rules.late == "partial",
            share=allowed_share(self._limits, found),
            sleep=self._sleep,
        )


def steps(world: World, place: Place, pace: "LivePace | FleetPace") -> Iterator[Step]:
    """Yield mini-batches with subnets of the controller's choice, each when it is asked for."""
    local_, share = world.method.local, world.data.devices[place.device % len(world.data)]
    each = -(-len(share) // local_.batch)
    number = 0
    while (chosen := pace.choose(number)) is not None:
        row, macs = chosen
        epoch, place_in = divmod(number, each)
        if place_in == 0:
            order = batches(
                world.data.train, share, local_.batch, place.seed, place.round, place.device, epoch
            )
        x, y = order[place_in]
        yield Step(x, y, world.method.subnet(world.net, row, place, number), macs)
        number += 1


def local(described: Any, limits: Limits, pace: Pace = "measured") -> Any:
    """Point an experiment at this device's own folders; refuse what its user did not allow."""
    data, network = dict(described["data"]), dict(described["network"])
    data["root"] = limits.data
    for part in (data, network):
        if is_own(part["name"]):
            place, _, function = part["name"].rpartition(":")
            if limits.code is None:
                raise ValueError(f"expected --code FOLDER on the device for {part['name']!r}")
            if Path(place).suffix != ".py":
                raise ValueError(f"expected FILE.py:FUNCTION for a device, got {part['name']!r}")
            part["name"] = f"{Path(limits.code) / Path(place).name}:{function}"
    fleet = _recorded(described["fleet"], limits, pace)
    return described | {"data": data, "network": network, "fleet": fleet}


def _recorded(part: Any, limits: Limits, pace: Pace) -> Any:
    """Take recordings from the user's folder for a rehearsal; a device that measures needs none."""
    if isinstance(part, list | tuple):
        return [_recorded(each, limits, pace) for each in part]
    if not isinstance(part, dict):
        return part
    if "path" not in part:
        return {name: _recorded(each, limits, pace) for name, each in part.items()}
    if pace == "measured":
        return {"type": "constant", "low": 1.0}
    if limits.data is None:
        raise ValueError(f"expected --data FOLDER on the device for {part['path']!r}")
    return part | {"path": str(Path(limits.data) / Path(part["path"]).name)}


def _nothing(update: Update) -> Update:
    return Update(update.device, {}, 0, 0, 0.0, 0.0)


def single_threaded() -> None:
    """Give torch one thread: a device shares its machine, and results must not depend on it."""
    torch.set_num_threads(1)
