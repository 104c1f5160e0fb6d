"""What comes back from a device: read, drawn again from its rows, and judged by the guard."""

from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

import torch

from pliant.deploy.curve import Curve, curve_from
from pliant.deploy.letters import CHANGE, EXTRA, Answer, BadLetter, read_answer
from pliant.deploy.pace import Work
from pliant.deploy.post import Reply
from pliant.deploy.squeeze import AnySqueeze, restored
from pliant.deploy.subnets import drawn
from pliant.devices import PerBatch
from pliant.engine.job import World
from pliant.methods.base import Place, Update
from pliant.methods.guard import Manifest, Policy, Spec, admitted
from pliant.params import Params

SLACK = 1_000_000  # bytes of an answer beside its tensors
REASON = 300  # letters of what a device says of its failure
LATE, DROPPED = "late", "dropped"


@dataclass(frozen=True, eq=False)
class Ask:
    """An order as it was sent, and what a valid answer looks like."""

    place: Place
    work: Work
    manifest: Manifest
    letter: bytes
    squeeze: AnySqueeze
    row: int | None  # that the server has chosen
    extra: Params  # that was sent beside the network


@dataclass(frozen=True, eq=False)
class Received:
    """What came from one device: an update that is valid, or why there is none."""

    device: int
    arrival: float  # seconds since the letters were sent
    size: int  # bytes
    update: Update | None
    end: str = ""  # where there is no update: late, dropped, or rejected: why
    answer: Answer | None = None  # whose times make sense
    curve: Curve | None = None


def accept(world: World, reply: Reply, ask: Ask, policy: Policy, arrival: float) -> Received:
    """Turn a reply into an update, or say why not."""
    device = ask.place.device

    def refused(why: str) -> Received:
        end = f"rejected: device {device}: expected {why[:REASON]}"
        return Received(device, arrival, len(reply.raw or b""), None, end)

    if reply.raw is None:
        return Received(device, arrival, 0, None, f"{DROPPED}: {reply.reason[:REASON]}")
    held = sum(
        _bytes(spec) for spec in (*ask.manifest.change.values(), *ask.manifest.extra.values())
    )
    most = int(policy.bytes * held) + SLACK
    if len(reply.raw) > most:
        return refused(f"no more than {most} bytes, got {len(reply.raw)}")
    try:
        answer, tensors = read_answer(reply.raw)
    except BadLetter as error:
        return refused(str(error))
    if answer.device != device or answer.round != ask.place.round:
        return refused(f"an answer to round {ask.place.round}, got one to {answer.round}")
    if answer.kind not in ("update", "late"):
        why = f"{answer.kind}, {answer.reason}"[:REASON]
        return Received(device, arrival, len(reply.raw), None, f"{DROPPED}: {why}")
    problem = _odd_times(answer, arrival) or _odd_rows(world, ask, answer)
    if problem is not None:
        return refused(problem)
    if answer.kind == "late":
        return Received(
            device, arrival, len(reply.raw), None, LATE, answer, curve_from(answer.curve)
        )
    try:
        update = _update(world, ask, answer, tensors)
    except (ValueError, LookupError, RuntimeError, TypeError) as error:
        return refused(f"tensors as asked for, got others: {error}")
    manifest = replace(ask.manifest, memory={})  # what a device keeps, it keeps
    kept, reasons = admitted([(device, update)], {device: manifest}, policy)
    if not kept:
        return Received(device, arrival, len(reply.raw), None, f"rejected: {reasons[device]}")
    return Received(device, arrival, len(reply.raw), kept[0], "", answer, curve_from(answer.curve))


def _update(world: World, ask: Ask, answer: Answer, tensors: dict[str, Params]) -> Update:
    odd = sorted(tensors.keys() - {CHANGE, EXTRA})
    if odd:
        raise ValueError(f"there should be none of {odd[0]!r}")
    sent = tensors.get(CHANGE, {})
    like = {
        name: (torch.Size(spec.shape), spec.dtype)
        for name, spec in ask.manifest.change.items()
        if name in world.net.trained  # statistics travel as they are
    }
    trained = drawn(world, ask.place, answer.rows, ask.extra)
    return Update(
        answer.device,
        restored(sent, ask.squeeze, like),
        answer.samples,
        len(answer.rows),
        answer.macs,
        answer.loss,  # type: ignore[arg-type] # the guard allows none
        ask.manifest.subnet,
        tensors.get(EXTRA, {}),
        {},
        answer.owned,
        trained,
    )


def _odd_times(answer: Answer, arrival: float) -> str | None:
    """Return what is impossible about when a device says it worked."""
    times = answer.times
    if len(times) != len(answer.rows) + 1:
        return f"{len(answer.rows) + 1} times for {len(answer.rows)} mini-batches, got {len(times)}"
    is_rising = all(before <= after for before, after in pairwise((0.0, *times, answer.seconds)))
    if not is_rising or not answer.seconds <= arrival:
        return f"mini-batches one after another in {arrival:.3f} s, got other times"
    return None


def _odd_rows(world: World, ask: Ask, answer: Answer) -> str | None:
    """Return what is impossible about the rows that a device says it has chosen."""
    if len(answer.rows) > len(ask.work.sizes):
        return f"1 to {len(ask.work.sizes)} steps, got {len(answer.rows)}"
    allowed = range(ask.row, ask.row + 1) if ask.row is not None else _rows(world)
    odd = [row for row in answer.rows if row not in allowed]
    return f"rows from {allowed[0]} to {allowed[-1]}, got {odd[0]}" if odd else None


def _rows(world: World) -> range:
    plan = world.method.plan(world.net)
    return range(len(plan.rows.shares)) if isinstance(plan, PerBatch) else range(1)


def _bytes(spec: Spec) -> int:
    return prod(spec.shape) * spec.dtype.itemsize
