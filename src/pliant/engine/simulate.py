"""Simulation in virtual time: rounds of selection, timetable, training, merging, evaluation."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from torch import nn

from pliant.data import Federated
from pliant.devices import FULL, Choice, Fleet, Given, joules
from pliant.devices.draws import FloatArray, IntArray
from pliant.engine.agenda import Agenda
from pliant.engine.evaluate import Evaluation, Score, evaluate, personal
from pliant.engine.expected import Expected
from pliant.engine.job import EXTRA, Job, Source, build_world, example_of, perform
from pliant.engine.ledger import RoundRecord, TaskRecord, summed
from pliant.engine.rules import End, Rules
from pliant.engine.schedule import Timetable, opening, timetable
from pliant.engine.select import Selection, selected
from pliant.engine.store import Saved, Store, newest
from pliant.engine.tasks import Tasks
from pliant.engine.workers import AnyWorkers, Inline, Pool, opened
from pliant.methods.base import Answering, Costing, Method, Narrow, Place, State, Update
from pliant.methods.guard import Policy, admitted
from pliant.nn.elastic import Elastic, elastic
from pliant.params import Params, digest, nbytes, params_of
from pliant.value import Count, Value

Event = Literal["open", "close"]


class Setting(Value, frozen=True):
    """How rounds are run, whatever the method.

    >>> import pliant as pl
    >>> pl.Setting(rounds=20, per_round=5, rules=pl.Rules(late="partial")).rules.late
    'partial'
    """

    rounds: Count = 100
    per_round: Count = 10
    seed: int = 0
    select: Selection = "uniform"
    rules: Rules = Rules()
    evaluation: Evaluation = Evaluation()
    checkpoint_every: Count = 10  # rounds
    guard: Policy = Policy()


@dataclass
class _Run:
    """A run under way."""

    method: Method
    net: Elastic
    data: Federated
    fleet: Fleet
    setting: Setting
    saved: Saved

    def __post_init__(self) -> None:
        self.full_macs = self.net.macs(self.net.full, training=True)
        self.size = nbytes(self.saved.state.params)
        self.expected = Expected(self.method, self.net)
        self.owned: dict[int, tuple[int, tuple[int, ...]]] = {}
        # asked once: a check against a protocol takes longer than all else in a step's cost
        self.costing = self.method if isinstance(self.method, Costing) else None

    def macs(self, row: int, place: Place, step: int) -> float:
        """Return MACs per sample of a training step; the full network's are known."""
        if self.costing is not None:
            return self.costing.macs(self.net, row, place, step)
        subnet = self.method.subnet(self.net, row, place, step)
        if subnet is self.net.full:
            return self.full_macs
        return self.net.macs(subnet, training=True)

    def beside(self) -> tuple[int, int]:
        """Return the bytes that go down and up beside the network."""
        method = self.method
        up = method.answer_bytes(self.net) if isinstance(method, Answering) else 0
        return nbytes(self.saved.state.sent), up


def simulate(
    method: Method,
    net: nn.Module,
    data: Federated,
    fleet: Fleet,
    *,
    rounds: int | None = None,
    setting: Setting | None = None,
    workers: AnyWorkers | None = None,
    folder: Path | None = None,
    source: Source | None = None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Iterator[RoundRecord]:
    """Train a network across a fleet and yield a record of every round.

    With a `folder` the run writes its records and checkpoints there, and goes on from the last
    checkpoint that it finds; `trained(folder)` returns the network that it has come to. The given
    network is left as it is. `source` makes the network and the data anew in a worker process,
    where copying them there would cost more. When `is_stopped` says so, the run saves itself and
    ends.

    >>> import torch
    >>> import pliant as pl
    >>> images = pl.Images.from_tensors(torch.rand(40, 1, 28, 28), torch.arange(40) % 10)
    >>> data = pl.data.Source(images, images).share(pl.Iid(), devices=4, proxy=8)
    >>> fleet = pl.Fleet(size=4, speed=pl.Changing(low=0.25, high=1.0, per_round=2.0))
    >>> setting = pl.Setting(rounds=2, per_round=2, rules=pl.Rules(late="partial"))
    >>> rounds = pl.simulate(pl.Distreal(), pl.models.digits_cnn(), data, fleet, setting=setting)
    >>> [record.tasks for record in rounds]
    [2, 2]
    """
    setting = setting or Setting()
    if rounds is not None:
        setting = msgspec.structs.replace(setting, rounds=rounds)
    store = Store(folder) if folder is not None else None
    try:
        saved = (store.resume() if store else None) or Saved(0, 0.0, State(params_of(net)), {})
        setup = partial(build_world, source or partial(_given, net, data), method)
        with opened(workers or Inline(), setup, perform) as pool:
            # now, because meanwhile worker processes start
            flexible = elastic(net, example_of(data))
            run = _Run(method, flexible, data, fleet, setting, saved)
            yield from _rounds(run, pool, store, is_stopped)
    finally:
        if store:
            store.close()


def _given(net: nn.Module, data: Federated) -> tuple[nn.Module, Federated]:
    return net, data


def _rounds(
    run: _Run, pool: Pool[Job, Update], store: Store | None, is_stopped: Callable[[], bool]
) -> Iterator[RoundRecord]:
    agenda: Agenda[Event] = Agenda()
    last = run.setting.rounds
    if run.saved.round < last:
        agenda.add(run.saved.seconds, "open")
    for now, _ in agenda:
        number = run.saved.round
        table, tasks = _scheduled(run, number, now)
        updates, refused = _trained(run, pool, number, table, tasks)
        if len(updates) < run.setting.rules.needed(run.setting.per_round):
            updates = []  # an update that was refused never came, so the round is void
        before = run.saved.state.params
        state = run.method.merge(run.net, run.saved.state, updates)
        memory = run.saved.memory | {u.device: u.memory for u in updates if u.memory}
        close = now + table.close
        run.saved = Saved(number + 1, close, state, memory)
        records = _recorded(run, number, table, tasks, updates, refused)
        total = summed(number, close, records)
        is_last = number + 1 == last
        if is_last or (number + 1) % run.setting.evaluation.every == 0:
            total = _evaluated(run, total, before, state, updates)
        if is_last:
            total = msgspec.structs.replace(total, digest=digest(state.params))
        is_over = is_last or is_stopped()
        if store:
            store.append([*records, total])
            if is_over or (number + 1) % run.setting.checkpoint_every == 0:
                store.save(run.saved)
        if not is_over:
            agenda.add(close, "open")
        yield total


def _evaluated(
    run: _Run, total: RoundRecord, before: Params, state: State, updates: list[Update]
) -> RoundRecord:
    """Add scores to a round: on all test images, or on each device's own where it has some."""
    if not run.data.tests:
        return msgspec.structs.replace(
            total, score=_scored(run, state.params), narrow=_narrow(run, state)
        )
    trained = {
        update.device: {name: before[name] + change for name, change in update.change.items()}
        for update in updates
        if update.subnet is None
    }
    found = personal(run.net.net, state.params, trained, run.data, run.setting.evaluation)
    return msgspec.structs.replace(total, personal=found)


def _scored(run: _Run, params: Params) -> Score:
    return evaluate(run.net.net, params, run.data, run.setting.evaluation)


def _narrow(run: _Run, state: State) -> Score | None:
    """Score the network without the filters that no device has trained yet, if there are any."""
    widest = run.method.widest(run.net, state) if isinstance(run.method, Narrow) else None
    if widest is None:
        return None
    small = run.net.take(state.params, widest)
    return _scored(run, run.net.embed(state.params, small, widest)[0])


def _scheduled(run: _Run, number: int, now: float) -> tuple[Timetable, Tasks]:
    """Choose devices and work out when each of their mini-batches begins and ends."""
    setting, net, method = run.setting, run.net, run.method
    devices = selected(
        run.fleet,
        setting.rules.selected(setting.per_round),
        setting.select,
        seed=setting.seed,
        round=number,
        now=now,
    )
    sizes = _batch_sizes(run, devices)
    full = sizes * run.full_macs
    whole = np.full(len(devices), float(run.size))
    down, up = run.beside()
    tasks = Tasks(devices, full, whole + down, whole + up)
    plan = method.plan(net)
    if plan.is_held and plan is not FULL:  # what is sent may be smaller: so is its transport
        moment = opening(run.fleet, tasks, seed=setting.seed, start=now)
        choice = plan.choose(moment)
        sent = _bytes(run, number, devices, choice.row)
        tasks, plan = Tasks(devices, full, sent + down, sent + up), Given(moment, choice)
    shown = {int(device): row for row, device in enumerate(devices)}

    def realised(which: IntArray, step: int, choice: Choice) -> FloatArray:
        costs = np.empty(len(which))
        for place, device in enumerate(which.tolist()):
            where = Place(setting.seed, number, device)
            each = run.macs(int(choice.row[place]), where, step)
            costs[place] = sizes[shown[device], step] * each
        return costs

    table = timetable(
        run.fleet,
        plan,
        tasks,
        setting.rules,
        seed=setting.seed,
        round=number,
        start=now,
        wanted=setting.per_round,
        realised=realised,
    )
    return table, tasks


def _bytes(run: _Run, number: int, devices: IntArray, rows: IntArray) -> FloatArray:
    """Return the bytes of what each device is sent: the network, or its packed part."""
    found = np.full(len(devices), float(run.size))
    for place, (device, row) in enumerate(zip(devices.tolist(), rows.tolist(), strict=True)):
        packed = run.method.sends(run.net, row, Place(run.setting.seed, number, device))
        if packed is not None:
            found[place] = nbytes(run.net.take(run.saved.state.params, packed))
    return found


def _batch_sizes(run: _Run, devices: IntArray) -> FloatArray:
    """Return (device, step): how many samples each mini-batch has."""
    local = run.method.local
    rows = []
    for device in devices.tolist():
        samples = len(run.data.devices[device % len(run.data)])
        whole, rest = divmod(samples, local.batch)
        rows.append(([local.batch] * whole + ([rest] if rest else [])) * local.epochs)
    longest = max(map(len, rows), default=1)  # nobody may be available
    padded = [row + [0] * (longest - len(row)) for row in rows]
    return np.array(padded, np.float64).reshape(len(rows), longest)


def _trained(
    run: _Run, pool: Pool[Job, Update], number: int, table: Timetable, tasks: Tasks
) -> tuple[list[Update], dict[int, str]]:
    """Train what will count, and nothing else; return what the guard lets through and why not."""
    local, setting = run.method.local, run.setting
    lr = local.schedule.rate(local.optimiser.lr, number, setting.rounds)
    batches = np.rint(tasks.full / run.full_macs).astype(np.int64)
    most = np.maximum(tasks.full, table.planned)  # a plan may charge for more than one pass
    jobs, bounds = [], []
    for place, device in enumerate(table.devices.tolist()):
        used = int(table.used[place])
        if used:
            rows = tuple(table.row[place, :used].tolist())
            macs = tuple(table.planned[place, :used].tolist())
            where = Place(setting.seed, number, device)
            memory = run.saved.memory.get(device, {})
            jobs.append(Job(where, rows, macs, lr, memory, *_owned(run, device)))
            bounds.append((batches[place, :used].tolist(), most[place, :used].tolist()))
    shared = dict(run.saved.state.params)
    shared |= {f"{EXTRA}{name}": tensor for name, tensor in run.saved.state.sent.items()}
    found = pool.run(jobs, shared, cost=lambda job: job.cost) if jobs else []
    manifests = {
        job.place.device: run.expected.manifest(shared, job, *bound)
        for job, bound in zip(jobs, bounds, strict=True)
    }
    replies = ((job.place.device, update) for job, update in zip(jobs, found, strict=True))
    return admitted(replies, manifests, setting.guard)


def _owned(run: _Run, device: int) -> tuple[int, tuple[int, ...]]:
    """Return how many samples a device has, and of which classes."""
    number = device % len(run.data)
    if number not in run.owned:
        share = run.data.devices[number]
        classes = np.unique(run.data.train.labels.numpy()[share])
        run.owned[number] = len(share), tuple(classes.tolist())
    return run.owned[number]


def _recorded(
    run: _Run,
    number: int,
    table: Timetable,
    tasks: Tasks,
    updates: list[Update],
    refused: dict[int, str],
) -> list[TaskRecord]:
    """Return what each task of a round cost and how it ended."""
    traits = run.fleet.traits(table.devices, seed=run.setting.seed)
    back = {update.device: update for update in updates}
    arrived = np.isfinite(table.arrival)
    up = np.where(arrived, tasks.up, 0.0)
    energy = joules(traits, table.spent, tasks.down + up)
    # a device that does not count stops when the round closes, whatever it would have done
    limit = np.where(table.used > 0, np.inf, table.close)[:, None]
    begun = (table.start < limit).sum(axis=1).tolist()
    ended = (np.isfinite(table.end) & (table.end <= limit)).sum(axis=1).tolist()
    found = []
    for place, device in enumerate(table.devices.tolist()):
        update, reason = back.get(device), refused.get(device)
        found.append(
            TaskRecord(
                round=number,
                device=device,
                end=_end(table, place, update, reason),
                samples=update.samples if update else 0,
                steps=int(table.used[place]) if update else 0,
                macs=float(table.spent[place]),
                useful=float(table.useful[place]) if update else 0.0,
                available=float(table.available[place]),
                down=int(tasks.down[place]),
                up=int(up[place]),
                seconds=float(table.busy[place]),
                joules=float(energy[place]),
                loss=update.loss if update else None,
                starts=tuple(table.start[place, : begun[place]].tolist()),
                ends=tuple(table.end[place, : ended[place]].tolist()),
                rows=tuple(table.row[place, : begun[place]].tolist()),
                short=int(table.is_short[place, : begun[place]].sum()),
            )
        )
    return found


def _end(table: Timetable, place: int, update: Update | None, reason: str | None) -> str:
    if reason:
        return f"rejected: {reason}"
    is_void = update is None and table.used[place] > 0
    return (End.VOID if is_void else End(table.ends[place])).name.lower()


def trained(folder: Path) -> Params:
    """Return the network that the run in a folder has come to.

    >>> import tempfile
    >>> from pathlib import Path
    >>> import torch
    >>> import pliant as pl
    >>> images = pl.Images.from_tensors(torch.rand(40, 1, 28, 28), torch.arange(40) % 10)
    >>> data = pl.data.Source(images, images).share(pl.Iid(), devices=4, proxy=8)
    >>> with tempfile.TemporaryDirectory() as place:
    ...     net, run = pl.models.digits_cnn(), Path(place, "run")
    ...     fleet = pl.Fleet(size=4)
    ...     rounds = list(pl.simulate(pl.FedAvg(), net, data, fleet, rounds=1, folder=run))
    ...     net.load_state_dict(pl.trained(run))
    <All keys matched successfully>
    """
    found = newest(folder)
    if found is None:
        raise ValueError(f"{folder}: expected a run with a checkpoint, found none")
    return found.state.params
