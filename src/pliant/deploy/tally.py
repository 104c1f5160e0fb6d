"""The ledger's line about a task on a real device: what it cost in MACs, bytes, seconds, joules."""

import numpy as np

from pliant.deploy.inbox import Ask, Received
from pliant.devices import joules
from pliant.engine.job import World
from pliant.engine.ledger import MERGED, TaskRecord
from pliant.experiment import Experiment
from pliant.methods.base import Costing


def recorded(
    world: World, experiment: Experiment, ask: Ask, got: Received | None, end: str, waited: float
) -> TaskRecord:
    """Return the record of a task; `waited` is how long the round had lasted before it was sent."""
    device = ask.place.device
    answer = None if got is None else got.answer
    rows = () if answer is None else answer.rows
    is_merged = end in MERGED
    each = [
        size * _macs(world, ask, row, step)
        for step, (row, size) in enumerate(zip(rows, ask.work.sizes, strict=False))
    ]
    macs = sum(each)
    times: list[float] = []
    if answer is not None and got is not None:
        # an answer took the time it says, at the end of what the server saw
        times = [waited + got.arrival - answer.seconds + time for time in answer.times]
    busy = times[-1] - times[0] if rows else 0.0
    length = experiment.fleet.round_seconds
    up = 0 if got is None else got.size
    traits = experiment.fleet.traits(np.array([device]), seed=experiment.seed)
    sent = np.array([float(len(ask.letter) + up)])
    update = got.update if got is not None and is_merged else None
    return TaskRecord(
        round=ask.place.round,
        device=device,
        end=end,
        samples=update.samples if update else 0,
        steps=len(rows) if is_merged else 0,
        macs=macs,
        useful=macs if is_merged else 0.0,
        available=macs * max(1.0, length / busy) if busy > 0 else macs,
        down=len(ask.letter),
        up=up,
        seconds=busy,
        joules=float(joules(traits, np.array([macs]), sent)[0]),
        loss=update.loss if update else None,
        starts=tuple(times[:-1]) if rows else (),
        ends=tuple(times[1:]) if rows else (),
        rows=tuple(rows),
        short=0 if answer is None else max(0, min(answer.short, len(rows))),
    )


def _macs(world: World, ask: Ask, row: int, step: int) -> float:
    if isinstance(world.method, Costing):
        return world.method.macs(world.net, row, ask.place, step)
    subnet = world.method.subnet(world.net, row, ask.place, step)
    return ask.work.full if subnet is world.net.full else world.net.macs(subnet, training=True)
