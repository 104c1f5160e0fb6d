"""Check the replies of devices: decode them, redraw their subnets and validate their updates."""

from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

from pliant.compression import AnyCompression
from pliant.deploy.messages import DELTA, EXTRA, MalformedMessage, TrainReply, decode_message
from pliant.deploy.server.transport import RawReply
from pliant.deploy.step_times import StepTimeCurve, parse_curve
from pliant.devices import PerBatch
from pliant.engine.local_work import LocalWork, WorkerContext, redraw_subnets
from pliant.methods.base import TaskKey, Update
from pliant.methods.error_feedback import decompress_delta
from pliant.methods.validation import UpdateManifest, ValidationPolicy, accept_valid
from pliant.params import Params, group_subtrees

OVERHEAD_BYTES = 1_000_000  # of a reply, besides its tensors
MAX_REASON_CHARS = 300
LATE, DROPPED = "late", "dropped"


@dataclass(frozen=True, eq=False)
class SentRequest:
    """A request as it was sent, and what a valid reply to it looks like."""

    key: TaskKey
    work: LocalWork
    manifest: UpdateManifest
    raw: bytes
    compression: AnyCompression
    row: int | None  # if the server has chosen one
    extra: Params  # sent along with the network


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


def check_reply(
    context: WorkerContext,
    message: RawReply,
    request: SentRequest,
    policy: ValidationPolicy,
    arrival: float,
) -> CheckedReply:
    """Turn a raw reply into an update, or explain why not."""
    device = request.key.device

    def end(outcome: str) -> CheckedReply:
        return CheckedReply(device, arrival, len(message.raw or b""), None, outcome)

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
    if reply.kind not in ("update", "late"):
        return end(f"{DROPPED}: " + f"{reply.kind}, {reply.reason}"[:MAX_REASON_CHARS])
    problem = _find_time_problem(reply, arrival) or _find_row_problem(context, request, reply)
    if problem is not None:
        return reject(problem)
    if reply.kind == "late":
        return replace(end(LATE), reply=reply, curve=parse_curve(reply.curve))
    try:
        update = _build_update(context, request, reply, group_subtrees(tensors))
    except (ValueError, LookupError, RuntimeError, TypeError) as error:
        return reject(f"tensors that match the request: {error}")
    manifest = replace(request.manifest, device_state=None)  # a device's state stays on the device
    updates, reasons = accept_valid([(device, update)], {device: manifest}, policy)
    if not updates:
        return end(f"rejected: {reasons[device]}")
    return replace(end(""), update=updates[0], reply=reply, curve=parse_curve(reply.curve))


def _build_update(
    context: WorkerContext, request: SentRequest, reply: TrainReply, tensors: dict[str, Params]
) -> Update:
    unknown = sorted(tensors.keys() - {DELTA, EXTRA})
    if unknown:
        raise ValueError(f"expected no tensors named {unknown[0]!r}")
    encoded, specs = tensors.get(DELTA, {}), request.manifest.delta
    trained = redraw_subnets(context, request.key, reply.rows, request.extra)
    return Update(
        reply.device,
        decompress_delta(context.net, encoded, request.compression, specs),
        reply.samples,
        len(reply.rows),
        reply.macs,
        reply.loss,  # type: ignore[arg-type] # the validation rejects None
        request.manifest.subnet,
        tensors.get(EXTRA, {}),
        None,
        reply.num_samples,
        trained,
    )


def _find_time_problem(reply: TrainReply, arrival: float) -> str | None:
    """Return what is impossible about the times that a device reports."""
    times = reply.times
    if len(times) != len(reply.rows) + 1:
        return f"{len(reply.rows) + 1} times for {len(reply.rows)} mini-batches, got {len(times)}"
    is_rising = all(before <= after for before, after in pairwise((0.0, *times, reply.seconds)))
    if not is_rising or not reply.seconds <= arrival:
        return f"times that rise and end within {arrival:.3f} s, got others"
    return None


def _find_row_problem(
    context: WorkerContext, request: SentRequest, reply: TrainReply
) -> str | None:
    """Return what is impossible about the rows that a device reports."""
    if len(reply.rows) > len(request.work.sizes):
        return f"1 to {len(request.work.sizes)} steps, got {len(reply.rows)}"
    policy = context.budget_policy
    first = last = request.row or 0
    if request.row is None and isinstance(policy, PerBatch):
        last = len(policy.rows.shares) - 1
    wrong = [row for row in reply.rows if not first <= row <= last]
    return f"rows from {first} to {last}, got {wrong[0]}" if wrong else None
