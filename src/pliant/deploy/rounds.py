"""The server's rounds on real devices: select, send, wait, guard, merge, evaluate, save.

Selection, guard, merge, ledger, records and checkpoints are the simulator's. The clock is not: a
round ends by its deadline, whatever devices do.
"""

import time
from collections.abc import Callable, Iterator
from itertools import takewhile
from pathlib import Path

import msgspec
import torch

from pliant.deploy.desk import (
    FOREVER,
    MERGED,
    POLL,
    Desk,
    asks_of,
    chosen_devices,
    judged,
    scores,
)
from pliant.deploy.desk import NotEnough as NotEnough
from pliant.deploy.inbox import Ask, Received, accept
from pliant.deploy.post import Link
from pliant.deploy.service import Service
from pliant.deploy.tally import recorded
from pliant.engine.job import World
from pliant.engine.ledger import RoundRecord, TaskRecord, summed
from pliant.engine.rules import Rules
from pliant.engine.store import Saved, Store, events
from pliant.experiment import Experiment
from pliant.methods.base import State
from pliant.params import digest, params_of


def serve(
    experiment: Experiment,
    world: World,
    link: Link,
    folder: Path,
    service: Service,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[RoundRecord]:
    """Run rounds until the last one and yield their records; go on where a folder's run was."""
    store = Store(folder)
    try:
        saved = store.resume() or Saved(0, 0.0, State(params_of(world.net.net)), {})
        desk = Desk(experiment, world, link, service, saved, clock, sleep)
        voids = [r.merged == 0 for r in events(folder) if isinstance(r, RoundRecord)]
        desk.retried = sum(voids)
        in_a_row = len(list(takewhile(bool, reversed(voids))))
        desk.in_a_row = in_a_row % (service.retries + 1)  # a run that has given up begins anew
        while desk.saved.round < experiment.rounds + desk.retried:
            records, total = _round(desk)
            store.append([*records, total])
            store.save(desk.saved)  # each round: what was merged is never lost
            yield total
            if desk.in_a_row > service.retries:
                raise NotEnough(f"nothing came back in {desk.in_a_row} rounds in a row")
    finally:
        store.close()


def _round(desk: Desk) -> tuple[list[TaskRecord], RoundRecord]:
    number, experiment = desk.saved.round, desk.experiment
    opened = desk.clock()
    devices = chosen_devices(desk, number)
    asks = asks_of(desk, number, devices)
    began = desk.clock()
    received = _exchange(desk, number, asks, began)
    closed = desk.clock() - opened
    verdict = judged(desk, asks, received)
    counted = [found.update for found in received.values() if found.device in verdict.counted]
    updates = sorted((u for u in counted if u is not None), key=lambda update: update.device)
    state = desk.world.method.merge(desk.world.net, desk.saved.state, updates)
    start = desk.saved.seconds
    seconds = start + closed
    marks = {u.device: {MERGED: torch.tensor(number)} for u in updates}
    desk.saved = Saved(number + 1, seconds, state, desk.saved.memory | marks)
    waited = began - opened
    records = [
        recorded(desk.world, experiment, ask, received.get(device), verdict.ends[device], waited)
        for device, ask in sorted(asks.items())
    ]
    total = summed(number, seconds, records)
    total = msgspec.structs.replace(total, asked=start + waited)
    desk.retried += not updates
    desk.in_a_row = 0 if updates else desk.in_a_row + 1
    is_last = number + 1 == experiment.rounds + desk.retried
    if is_last or (number + 1) % experiment.evaluation.every == 0:
        score, narrow = scores(desk.world, state, experiment.evaluation)
        total = msgspec.structs.replace(total, score=score, narrow=narrow)
    if is_last:
        total = msgspec.structs.replace(total, digest=digest(state.params))
    return records, total


def _exchange(desk: Desk, number: int, asks: dict[int, Ask], began: float) -> dict[int, Received]:
    """Send all letters and gather answers until all, or enough, are in or the deadline is past."""
    rules, length = desk.experiment.rules, desk.experiment.fleet.round_seconds
    window = length * (1 + rules.grace) + desk.service.allowance
    if rules.late == "wait":
        window = length * FOREVER
    desk.link.send({d: ask.letter for d, ask in asks.items()}, round=number, seconds=window)
    found: dict[int, Received] = {}
    while len(found) < len(asks) and desk.clock() - began < window:
        for reply in desk.link.replies():
            arrival = desk.clock() - began
            got = accept(desk.world, reply, asks[reply.device], desk.experiment.guard, arrival)
            found[reply.device] = got
            if got.curve is not None:
                desk.curves[reply.device] = got.curve
        valid = sum(_counts(asks[device], got, rules) for device, got in found.items())
        if rules.closes_early and valid >= desk.experiment.per_round:
            break
        if len(found) < len(asks):
            desk.sleep(POLL)
    return found


def _counts(ask: Ask, got: Received, rules: Rules) -> bool:
    """Tell whether an answer may be merged: an unfinished one only where parts of work count."""
    if got.update is None:
        return False
    return rules.late == "partial" or got.update.steps == len(ask.work.sizes)
