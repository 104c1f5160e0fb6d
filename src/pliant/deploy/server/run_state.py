"""The server's side of a round: select devices, make requests, decide which updates to merge."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from pliant.deploy.messages import EXTRA, PARAMS, TrainRequest, decode_reply, encode_message
from pliant.deploy.server.reply_validation import DROPPED, LATE, CheckedReply, SentRequest
from pliant.deploy.server.transport import Transport
from pliant.deploy.settings import ServerSettings
from pliant.deploy.step_times import StepTimeCurve, parse_curve
from pliant.devices import DeviceStatus
from pliant.engine.evaluation import Evaluation, Score, evaluate
from pliant.engine.local_work import EXTRA_PREFIX as SHARED_EXTRA
from pliant.engine.local_work import Job, LocalWork, WorkerContext, make_local_work, make_task
from pliant.engine.manifests import ManifestBuilder
from pliant.engine.round_rules import TaskOutcome, close_round
from pliant.engine.run_store import RunState
from pliant.engine.selection import select_devices
from pliant.engine.timetable import RoundTasks, compute_start_status
from pliant.experiment.config import Experiment
from pliant.methods.base import ServerState, TaskKey, TracksCoverage
from pliant.params import Params
from pliant.rng import rng_stream
from pliant.value import encode

POLL_SECONDS = 0.25
MAX_WAIT_ROUNDS = 1000  # how long a server with `late = "wait"` waits, in round lengths
LAST_MERGED = "merged"


class NotEnoughDevices(RuntimeError):
    """Too few devices are online, or too many consecutive rounds merged no update."""


@dataclass
class ServerRun:
    """Everything that a running server works with."""

    experiment: Experiment
    context: WorkerContext
    transport: Transport
    settings: ServerSettings
    run_state: RunState
    clock: Callable[[], float]
    sleep: Callable[[float], None]
    curves: dict[int, StepTimeCurve] = field(default_factory=dict)
    empty_rounds: int = 0  # rounds in which no update was merged
    consecutive_empty_rounds: int = 0
    has_started: bool = False  # this process has run a round

    def __post_init__(self) -> None:
        self.manifest_builder = ManifestBuilder(self.context.method, self.context.net)
        self.full_macs = self.context.net.macs(self.context.net.full, training=True)

    def local_work(self, device: int) -> LocalWork:
        """Return the mini-batches of a device and their cost."""
        return make_local_work(
            len(self.sample_indices(device)), self.context.method.local, self.full_macs
        )

    def sample_indices(self, device: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        """Return the indices of a device's samples."""
        return np.asarray(self.context.data.shares[device % len(self.context.data)])


def select_online_devices(run: ServerRun, round: int) -> list[int]:
    """Wait for devices and select among them; with the whole fleet online, as the simulator does.

    The first round waits up to `patience` for enough devices, later rounds up to `allowance`. Then
    the round starts with the devices that are online, unless they are fewer than the quorum.
    """
    experiment = run.experiment
    fleet, rules = experiment.fleet, experiment.rules
    target = min(rules.selection_size(experiment.per_round), fleet.size)
    quorum = max(1, min(target, rules.quorum_size(experiment.per_round)))
    started_at = run.clock()
    while True:
        online = sorted(d for d in run.transport.find_online_devices() if 0 <= d < fleet.size)
        waited = run.clock() - started_at
        if len(online) >= target:
            break
        if run.has_started and len(online) >= quorum and waited > run.settings.allowance:
            break
        if waited > run.settings.patience:
            if len(online) >= quorum:
                break
            raise NotEnoughDevices(f"expected {quorum} or more devices online, got {len(online)}")
        run.sleep(POLL_SECONDS)
    run.has_started = True
    if len(online) == fleet.size:
        devices = select_devices(
            fleet, target, "uniform", seed=experiment.seed, round=round, now=run.run_state.seconds
        )
        return [int(device) for device in devices]
    rng = rng_stream(experiment.seed, "select", round)
    indices = rng.choice(len(online), min(target, len(online)), replace=False, shuffle=False)
    return sorted(online[int(index)] for index in indices)


def make_requests(run: ServerRun, round: int, devices: list[int]) -> dict[int, SentRequest]:
    """Return for each device its encoded request and what a valid reply to it looks like."""
    experiment, state = run.experiment, run.run_state.server_state
    method, net = run.context.method, run.context.net
    local = method.local
    lr = local.schedule.lr_at(local.optimiser.lr, round - run.empty_rounds, experiment.rounds)
    shared: Params = dict(state.params)
    shared |= {f"{SHARED_EXTRA}{name}": tensor for name, tensor in state.broadcast.items()}
    choices = _choose_rows(run, round, devices)
    seconds = experiment.fleet.round_seconds
    if experiment.rules.late == "wait":
        seconds *= MAX_WAIT_ROUNDS
    config = encode(experiment)
    requests = {}
    for device in devices:
        work = run.local_work(device)
        row, macs = choices.get(device, (None, 0.0))
        key = TaskKey(experiment.seed, round, device)
        indices = run.sample_indices(device)
        classes = np.unique(run.context.data.train.labels.numpy()[indices])
        job = Job(key, (row or 0,), (macs,), lr, {}, len(indices), tuple(classes.tolist()))
        full_macs = [size * work.full_macs for size in work.sizes]
        factor = max(1.0, macs / full_macs[0])  # a policy may charge for more than one pass
        max_macs = [factor * step_macs for step_macs in full_macs]
        manifest = run.manifest_builder.build(shared, job, work.sizes, max_macs)
        merged_round = run.run_state.device_states.get(device, {}).get(LAST_MERGED)
        request = TrainRequest(
            "train",
            config,
            device,
            round,
            lr,
            run.settings.pace,
            row,
            macs,
            seconds,
            None if merged_round is None else int(merged_round),
            run.settings.compression,
        )
        task = make_task(method, net, shared, job)
        raw = encode_message(request, {PARAMS: task.params, EXTRA: task.extra})
        requests[device] = SentRequest(
            key, work, manifest, raw, run.settings.compression, row, task.extra
        )
    return requests


def _choose_rows(run: ServerRun, round: int, devices: list[int]) -> dict[int, tuple[int, float]]:
    """Choose rows by the devices' reported speeds, if the method chooses on the server."""
    policy = run.context.method.make_budget_policy(run.context.net)
    if not policy.is_per_round or not devices:
        return {}
    works = [run.local_work(device) for device in devices]
    full_macs = np.zeros((len(devices), max(len(work.sizes) for work in works)))
    for index, work in enumerate(works):
        full_macs[index, : len(work.sizes)] = np.array(work.sizes) * work.full_macs
    zero = np.zeros(len(devices))
    tasks = RoundTasks(np.array(devices), full_macs, zero, zero)
    fleet, seed = run.experiment.fleet, run.experiment.seed
    if run.settings.pace == "simulated":
        status = compute_start_status(fleet, tasks, seed=seed, start=round * fleet.round_seconds)
    else:
        status = _estimate_status(run, tasks, fleet.round_seconds)
    choice = policy.choose(status)
    rows = zip(choice.row.tolist(), choice.macs.tolist(), strict=True)
    return dict(zip(devices, rows, strict=True))


def _estimate_status(run: ServerRun, tasks: RoundTasks, round_seconds: float) -> DeviceStatus:
    first_macs, total_macs = tasks.full_macs[:, 0], tasks.full_macs.sum(axis=1)
    speed = total_macs / round_seconds
    for index, device in enumerate(tasks.devices.tolist()):
        curve = run.curves.get(device) or _parse_hello_curve(run, device)
        if curve is not None:
            slot = round_seconds * first_macs[index] / total_macs[index]
            speed[index] = curve.share_within(slot) * first_macs[index] / slot
    time_left = np.full(len(speed), round_seconds)
    now = np.zeros(len(speed))
    return DeviceStatus(
        tasks.devices, 0, now, speed, time_left, round_seconds, first_macs, total_macs, total_macs
    )


def _parse_hello_curve(run: ServerRun, device: int) -> StepTimeCurve | None:
    raw = run.transport.hello_replies.get(device)
    try:
        return None if raw is None else parse_curve(decode_reply(raw)[0].curve)
    except ValueError:
        return None


@dataclass(frozen=True)
class MergeDecision:
    """How each task of a round ended, and whose updates are merged."""

    outcomes: dict[int, str]
    merged: set[int]


def decide_merge(
    run: ServerRun, requests: dict[int, SentRequest], replies: dict[int, CheckedReply]
) -> MergeDecision:
    """Apply the round rules to the replies."""
    devices = sorted(requests)
    round_seconds = run.experiment.fleet.round_seconds + run.settings.allowance
    arrival, dropout = np.full(len(devices), np.inf), np.full(len(devices), np.inf)
    steps = np.zeros(len(devices), np.int64)
    for index, device in enumerate(devices):
        reply = replies.get(device)
        if reply is None:
            continue
        if reply.update is not None:
            is_complete = reply.update.steps == len(requests[device].work.sizes)
            arrival[index] = reply.arrival if is_complete else np.inf
            steps[index] = reply.update.steps
        elif reply.outcome.startswith(DROPPED):
            dropout[index] = reply.arrival
    result = close_round(
        run.experiment.rules,
        arrival,
        steps,
        dropout,
        target_updates=run.experiment.per_round,
        round_seconds=round_seconds,
        deadline=max([round_seconds, *(reply.arrival for reply in replies.values())]),
    )
    outcomes, merged = {}, set()
    for index, device in enumerate(devices):
        outcome = TaskOutcome(result.outcomes[index])
        outcomes[device] = outcome.name.lower()
        reply = replies.get(device)
        if outcome in (TaskOutcome.FINISHED, TaskOutcome.PARTIAL):
            merged.add(device)
        elif reply is not None and reply.outcome not in ("", LATE):
            outcomes[device] = reply.outcome
    return MergeDecision(outcomes, merged)


def evaluate_state(
    context: WorkerContext, state: ServerState, evaluation: Evaluation
) -> tuple[Score, Score | None]:
    """Score the network, and again without the filters that no device has trained yet."""
    net, method = context.net, context.method
    score = evaluate(net.module, state.params, context.data, evaluation)
    trained = method.find_trained_subnet(net, state) if isinstance(method, TracksCoverage) else None
    if trained is None:
        return score, None
    packed = net.take(state.params, trained)
    params = net.embed(state.params, packed, trained)[0]
    return score, evaluate(net.module, params, context.data, evaluation)
