"""What a server has at hand in a round: which devices, what each is asked, what came of it."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from pliant.deploy.curve import Curve, curve_from
from pliant.deploy.inbox import DROPPED, LATE, Ask, Received
from pliant.deploy.letters import EXTRA, PARAMS, Order, packed, read_answer
from pliant.deploy.pace import Work, work_of
from pliant.deploy.post import Link
from pliant.deploy.service import Service
from pliant.devices import Moment
from pliant.engine.evaluate import Evaluation, Score, evaluate
from pliant.engine.expected import Expected
from pliant.engine.job import EXTRA as SHARED_EXTRA
from pliant.engine.job import Job, World, sent
from pliant.engine.rules import End, judge
from pliant.engine.schedule import opening
from pliant.engine.select import selected
from pliant.engine.store import Saved
from pliant.engine.tasks import Tasks
from pliant.experiment import Experiment
from pliant.methods.base import Narrow, Place, State
from pliant.params import Params
from pliant.rng import stream
from pliant.value import encode

POLL = 0.25  # seconds between two looks for answers
FOREVER = 1000  # rounds that a server which waits gives a device
MERGED = "merged"


class NotEnough(RuntimeError):
    """Too few devices came, or nothing came back from them again and again."""


@dataclass
class Desk:
    """What the server has at hand while it runs."""

    experiment: Experiment
    world: World
    link: Link
    service: Service
    saved: Saved
    clock: Callable[[], float]
    sleep: Callable[[float], None]
    curves: dict[int, Curve] = field(default_factory=dict)
    retried: int = 0  # rounds that came to nothing
    in_a_row: int = 0
    is_begun: bool = False  # devices have come to this process

    def __post_init__(self) -> None:
        self.expected = Expected(self.world.method, self.world.net)
        self.full = self.world.net.macs(self.world.net.full, training=True)

    def work(self, device: int) -> Work:
        """Return the mini-batches of a device."""
        return work_of(len(self.share(device)), self.world.method.local, self.full)

    def share(self, device: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        """Return the indices of a device's samples."""
        found = self.world.data.devices[device % len(self.world.data)]
        return np.asarray(found)


def chosen_devices(desk: Desk, number: int) -> list[int]:
    """Wait for devices and choose among them; the simulator's choice when all are there.

    The first round waits long for as many as are wanted, later ones no longer than for an answer.
    Then it goes on with those that are there, unless they are fewer than the quorum.
    """
    experiment = desk.experiment
    fleet, rules = experiment.fleet, experiment.rules
    wanted = min(rules.selected(experiment.per_round), fleet.size)
    least = max(1, min(wanted, rules.needed(experiment.per_round)))
    began = desk.clock()
    while True:
        there = {device for device in desk.link.online() if 0 <= device < fleet.size}
        waited = desk.clock() - began
        if len(there) >= wanted:
            break
        if desk.is_begun and len(there) >= least and waited > desk.service.allowance:
            break
        if waited > desk.service.patience:
            if len(there) >= least:
                break
            raise NotEnough(f"waited for {least} devices or more, {len(there)} came")
        desk.sleep(POLL)
    desk.is_begun = True
    if len(there) == fleet.size:
        chosen = selected(
            fleet, wanted, "uniform", seed=experiment.seed, round=number, now=desk.saved.seconds
        )
        return [int(device) for device in chosen]
    rng = stream(experiment.seed, "select", number)
    order = sorted(there)
    picks = rng.choice(len(order), min(wanted, len(order)), replace=False, shuffle=False)
    return sorted(order[int(pick)] for pick in picks)


def asks_of(desk: Desk, number: int, devices: list[int]) -> dict[int, Ask]:
    """Return for each device what it is asked, in bytes, and what a valid answer looks like."""
    world, experiment = desk.world, desk.experiment
    method, net = world.method, world.net
    local = method.local
    lr = local.schedule.rate(local.optimiser.lr, number - desk.retried, experiment.rounds)
    shared: Params = dict(desk.saved.state.params)
    shared |= {f"{SHARED_EXTRA}{name}": tensor for name, tensor in desk.saved.state.sent.items()}
    held = _held(desk, number, devices)
    length = experiment.fleet.round_seconds
    seconds = length * FOREVER if experiment.rules.late == "wait" else length
    described = encode(experiment)
    asks = {}
    for device in devices:
        work = desk.work(device)
        row, macs = held.get(device, (None, 0.0))
        place = Place(experiment.seed, number, device)
        owned = desk.share(device)
        classes = np.unique(world.data.train.labels.numpy()[owned])
        job = Job(place, (row or 0,), (macs,), lr, {}, len(owned), tuple(classes.tolist()))
        full = [size * work.full for size in work.sizes]
        most = max(1.0, macs / full[0])  # a plan may charge for more than one pass
        manifest = desk.expected.manifest(shared, job, work.sizes, [most * each for each in full])
        mark = desk.saved.memory.get(device, {}).get(MERGED)
        order = Order(
            "train",
            described,
            device,
            number,
            lr,
            desk.service.pace,
            row,
            macs,
            seconds,
            None if mark is None else int(mark),
            desk.service.squeeze,
        )
        task = sent(method, net, shared, job)
        letter = packed(order, {PARAMS: task.params, EXTRA: task.extra})
        asks[device] = Ask(place, work, manifest, letter, desk.service.squeeze, row, task.extra)
    return asks


def _held(desk: Desk, number: int, devices: list[int]) -> dict[int, tuple[int, float]]:
    """Choose for devices whose method lets the server choose, by what they said of their speed."""
    plan = desk.world.method.plan(desk.world.net)
    if not plan.is_held or not devices:
        return {}
    works = [desk.work(device) for device in devices]
    longest = max(len(work.sizes) for work in works)
    full = np.zeros((len(devices), longest))
    for place, work in enumerate(works):
        full[place, : len(work.sizes)] = np.array(work.sizes) * work.full
    nothing = np.zeros(len(devices))
    tasks = Tasks(np.array(devices), full, nothing, nothing)
    length = desk.experiment.fleet.round_seconds
    if desk.service.pace == "fleet":
        start = number * length
        moment = opening(desk.experiment.fleet, tasks, seed=desk.experiment.seed, start=start)
    else:
        moment = _measured(desk, tasks, length)
    choice = plan.choose(moment)
    return dict(
        zip(devices, zip(choice.row.tolist(), choice.macs.tolist(), strict=True), strict=True)
    )


def _measured(desk: Desk, tasks: Tasks, length: float) -> Moment:
    whole = tasks.full.sum(axis=1)
    speed = whole / length
    for place, device in enumerate(tasks.devices.tolist()):
        curve = desk.curves.get(device) or _greeting(desk, device)
        if curve is not None:
            slot = length * tasks.full[place, 0] / whole[place]
            speed[place] = curve.within(slot) * tasks.full[place, 0] / slot
    left = np.full(len(speed), length)
    zero = np.zeros(len(speed))
    return Moment(tasks.devices, 0, zero, speed, left, length, tasks.full[:, 0], whole, whole)


def _greeting(desk: Desk, device: int) -> Curve | None:
    raw = desk.link.greetings.get(device)
    try:
        return None if raw is None else curve_from(read_answer(raw)[0].curve)
    except ValueError:
        return None


@dataclass(frozen=True)
class Verdict:
    ends: dict[int, str]
    counted: set[int]


def judged(desk: Desk, asks: dict[int, Ask], received: dict[int, Received]) -> Verdict:
    rules, devices = desk.experiment.rules, sorted(asks)
    length = desk.experiment.fleet.round_seconds + desk.service.allowance
    deadline = max([length, *(got.arrival for got in received.values())])
    arrival, done, leaves = (np.full(len(devices), np.inf) for _ in range(3))
    done[:] = 0
    for place, device in enumerate(devices):
        got = received.get(device)
        if got is None:
            continue
        if got.update is not None:
            is_whole = got.update.steps == len(asks[device].work.sizes)
            arrival[place] = got.arrival if is_whole else np.inf
            done[place] = got.update.steps
        elif got.end.startswith(DROPPED):
            leaves[place] = got.arrival
    verdict = judge(
        rules,
        arrival,
        done.astype(np.int64),
        leaves,
        wanted=desk.experiment.per_round,
        length=length,
        deadline=deadline,
    )
    ends, counted = {}, set()
    for place, device in enumerate(devices):
        end = End(verdict.ends[place])
        ends[device] = end.name.lower()
        got = received.get(device)
        if end in (End.FINISHED, End.PARTIAL):
            counted.add(device)
        elif got is not None and got.end not in ("", LATE):
            ends[device] = got.end
    return Verdict(ends, counted)


def scores(world: World, state: State, how: Evaluation) -> tuple[Score, Score | None]:
    """Score the network, and once more without the filters that no device has trained yet."""
    net, method = world.net, world.method
    score = evaluate(net.net, state.params, world.data, how)
    widest = method.widest(net, state) if isinstance(method, Narrow) else None
    if widest is None:
        return score, None
    small = net.take(state.params, widest)
    return score, evaluate(net.net, net.embed(state.params, small, widest)[0], world.data, how)
