"""The replies of devices: decode and validate their updates, and record their tasks."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any, Protocol

import numpy as np

from pliant.deploy.messages import DELTA, EXTRA, AnyMessage, TrainReply, decode_message
from pliant.deploy.server.presence import Battery
from pliant.deploy.settings import MalformedMessage
from pliant.deploy.step_times import StepTimeCurve, parse_curve
from pliant.devices import PerBatch, compute_joules
from pliant.engine.ledger import MERGED_OUTCOMES, TaskRecord
from pliant.engine.local_work import redraw_subnets
from pliant.engine.round_loop import Run
from pliant.engine.worker_context import WorkerContext
from pliant.methods.base import TaskKey, Update
from pliant.methods.error_feedback import decompress_delta
from pliant.methods.validation import UpdateManifest, ValidationPolicy, accept_valid
from pliant.params import Params, get_params, group_subtrees, nbytes

OVERHEAD_BYTES = 1_000_000  # of a reply, besides its tensors
MAX_REASON_CHARS = 300
LATE, DROPPED = "late", "dropped"
NONCE_BYTES = 16


@dataclass(frozen=True)
class RawReply:
    """The bytes that a device sent, or the reason why there are none."""

    device: int
    raw: bytes | None
    reason: str = ""


class MessageTransport(Protocol):
    """Connect a server with its devices, which are known by their numbers."""

    @property
    def hello_replies(self) -> Mapping[int, bytes]:
        """Return the devices' replies to the server's hello."""

    def find_online_devices(self) -> set[int]:
        """Return the devices that are reachable now."""

    def send(
        self, requests: Mapping[int, AnyMessage], *, round: int, seconds: float, adds: bool = False
    ) -> None:
        """Send each device its request, and stop waiting for replies to earlier ones.

        With `adds`, stop waiting only for the replies of the same devices.
        """

    def find_lost_devices(self) -> set[int]:
        """Return the devices that have left or restarted since their last request was sent."""

    def poll_replies(self) -> Iterable[RawReply]:
        """Return the replies since the last call, in any order, to be read once."""

    def count_carrier_bytes(self, size: int) -> int:
        """Return the bytes that carry a request and its reply of together this size."""


@dataclass(frozen=True, eq=False)
class SentRequest:
    """A request as it was sent, and what a valid reply to it looks like."""

    key: TaskKey
    row: int | None  # if the server has chosen one
    last_row: int | None  # that the device may choose; None: any
    extra: Params  # sent along with the network
    raw: AnyMessage
    manifest: UpdateManifest  # of all samples that the device has declared
    nonce: str
    max_share: float  # of the full network's MACs, in a step

    def fit_manifest(self, run: Run, num_samples: int) -> UpdateManifest:
        """Return what a valid reply looks like after training on this many samples."""
        if num_samples == run.context.data.count_samples(self.key.device):
            return self.manifest
        work = run.context.plan_work(self.key.device, num_samples)
        share = self.max_share * (1 + 1e-9)  # for rounding on the device
        return replace(
            self.manifest,
            batch_sizes=work.sizes,
            max_macs=tuple(share * (size * work.full_macs) for size in work.sizes),
            num_samples=num_samples if self.manifest.num_samples else 0,
        )


@dataclass(frozen=True, eq=False)
class CheckedReply:
    """The outcome of one request: a valid update, or the reason why there is none."""

    device: int
    arrival: float  # seconds since the requests were sent
    size: int  # bytes
    update: Update | None
    outcome: str = ""  # if there is no update: `late`, `dropped: …` or `rejected: …`
    reply: TrainReply | None = None  # if its times and rows are plausible
    curve: StepTimeCurve | None = None
    batch_sizes: tuple[int, ...] = ()  # of the samples that the device had
    battery: Battery | None = None  # if the device has reported one


def find_max_reply_bytes(context: WorkerContext, policy: ValidationPolicy) -> int:
    """Return the size that no valid reply exceeds: a delta, and as much that a method adds."""
    network_bytes = nbytes(get_params(context.net.module))
    return int(policy.size_factor * 2 * network_bytes) + OVERHEAD_BYTES


def check_reply(run: Run, request: SentRequest, message: RawReply, arrival: float) -> CheckedReply:
    """Turn a raw reply into an update, or explain why not."""
    device, policy = request.key.device, run.settings.guard
    battery = None

    def end(outcome: str) -> CheckedReply:
        return CheckedReply(
            device, arrival, len(message.raw or b""), None, outcome, battery=battery
        )

    def reject(problem: str) -> CheckedReply:
        return end(f"rejected: device {device}: expected {problem[:MAX_REASON_CHARS]}")

    if message.raw is None:
        return end(f"{DROPPED}: {message.reason[:MAX_REASON_CHARS]}")
    specs = (*request.manifest.delta.values(), *request.manifest.extra.values())
    expected_bytes = sum(prod(spec.shape) * spec.dtype.itemsize for spec in specs)
    max_bytes = int(policy.size_factor * expected_bytes) + OVERHEAD_BYTES
    if len(message.raw) > max_bytes:
        return reject(f"no more than {max_bytes} bytes, got {len(message.raw)}")
    try:
        reply, tensors = decode_message(message.raw, TrainReply)
    except MalformedMessage as error:
        return reject(str(error))
    if reply.device != device or reply.round != request.key.round:
        return reject(f"a reply to round {request.key.round}, got one to round {reply.round}")
    if reply.nonce != request.nonce:
        return reject("the nonce of the request, got another")
    battery = _read_battery(reply)
    if reply.kind not in ("update", "late"):
        return end(f"{DROPPED}: " + f"{reply.kind}, {reply.reason}"[:MAX_REASON_CHARS])
    max_samples = run.context.data.count_samples(device)
    if not 1 <= reply.num_samples <= max_samples:
        return reject(f"1 to {max_samples} local samples, got {reply.num_samples}")
    request = replace(request, manifest=request.fit_manifest(run, reply.num_samples))
    problem = _find_time_problem(reply, arrival) or _find_row_problem(run, request, reply)
    if problem is not None:
        return reject(problem)
    sizes = request.manifest.batch_sizes
    report: dict[str, Any] = {
        "reply": reply,
        "curve": parse_curve(reply.curve),
        "batch_sizes": sizes,
    }
    if reply.kind == "late":
        return replace(end(LATE), **report)
    try:
        update = _build_update(run, request, reply, group_subtrees(tensors))
    except (ValueError, LookupError, RuntimeError, TypeError) as error:
        return reject(f"tensors that match the request: {error}")
    manifest = replace(request.manifest, device_state=None)  # a device's state stays on the device
    accepted, reason = accept_valid(update, manifest, policy)
    if accepted is None:
        return end(f"rejected: {reason}")
    return replace(end(""), update=accepted, **report)


def _build_update(
    run: Run, request: SentRequest, reply: TrainReply, tensors: dict[str, Params]
) -> Update:
    unknown = sorted(tensors.keys() - {DELTA, EXTRA})
    if unknown:
        raise ValueError(f"expected no tensors named {unknown[0]!r}")
    encoded, specs = tensors.get(DELTA, {}), request.manifest.delta
    trained = redraw_subnets(run.context, request.key, reply.rows, request.extra)
    return Update(
        reply.device,
        decompress_delta(run.context.net, encoded, run.settings.compression, specs),
        reply.samples,
        len(reply.rows),
        reply.macs,
        reply.loss,  # type: ignore[arg-type] # the validation rejects None
        request.manifest.subnet,
        tensors.get(EXTRA, {}),
        None,
        request.manifest.num_samples,
        trained,
    )


def _read_battery(reply: TrainReply) -> Battery | None:
    """Return what a device says of its battery, unless it is impossible."""
    if reply.charge is None or not 0 <= reply.charge <= 1:
        return None
    return Battery(reply.charge, reply.is_charging)


def _find_time_problem(reply: TrainReply, arrival: float) -> str | None:
    """Return what is impossible about the times that a device reports."""
    times = reply.times
    if len(times) != len(reply.rows) + 1:
        return f"{len(reply.rows) + 1} times for {len(reply.rows)} mini-batches, got {len(times)}"
    is_rising = all(before <= after for before, after in pairwise((0.0, *times, reply.seconds)))
    if not is_rising or not reply.seconds <= arrival:
        return f"times that rise and end within {arrival:.3f} s, got others"
    return None


def _find_row_problem(run: Run, request: SentRequest, reply: TrainReply) -> str | None:
    """Return what is impossible about the rows that a device reports."""
    max_steps = len(request.manifest.batch_sizes)
    if len(reply.rows) > max_steps:
        return f"1 to {max_steps} steps, got {len(reply.rows)}"
    policy = run.context.budget_policy
    first = last = request.row or 0
    if request.row is None and isinstance(policy, PerBatch):
        last = len(policy.rows.shares) - 1 if request.last_row is None else request.last_row
    wrong = [row for row in reply.rows if not first <= row <= last]
    return f"rows from {first} to {last}, got {wrong[0]}" if wrong else None


def make_task_record(
    run: Run,
    request: SentRequest,
    reply: CheckedReply,
    outcome: str,
    wait_seconds: float,
    open_seconds: float,
    *,
    messages: MessageTransport,
) -> TaskRecord:
    """Return a task's record.

    Its request was sent `wait_seconds` into the round, which closed `open_seconds` later.
    """
    device = request.key.device
    report = reply.reply or TrainReply("late", device)
    rows, is_merged = report.rows, outcome in MERGED_OUTCOMES
    macs = sum(
        run.context.batch_macs(row, size, request.key, step)
        for step, (row, size) in enumerate(zip(rows, reply.batch_sizes, strict=False))
    )
    # the work took as long as the device says, and ended when the reply arrived
    times = [wait_seconds + reply.arrival - report.seconds + time for time in report.times]
    busy = times[-1] - times[0] if rows else 0.0
    costs = run.fleet.get_costs(np.array([device]), seed=run.settings.seed)
    traffic = np.array([float(len(request.raw) + reply.size)])
    idle = max(0.0, open_seconds - reply.arrival)
    steps = slice(None if run.settings.step_records else 0)  # all or none
    update = reply.update if is_merged else None
    return TaskRecord(
        round=request.key.round,
        device=device,
        outcome=outcome,
        samples=update.samples if update else 0,
        steps=len(rows) if is_merged else 0,
        macs=macs,
        useful=macs if is_merged else 0.0,
        available=macs * max(1.0, run.fleet.round_seconds / busy) if busy > 0 else macs,
        down=len(request.raw),
        up=reply.size,
        control=messages.count_carrier_bytes(len(request.raw) + reply.size),
        seconds=busy,
        joules=float(compute_joules(costs, np.array([macs]), traffic, idle)[0]),
        loss=update.loss if update else None,
        starts=tuple(times[:-1][steps]),
        ends=tuple(times[1:][steps]),
        rows=rows[steps],
        short=max(0, min(report.short, len(rows))),
    )
