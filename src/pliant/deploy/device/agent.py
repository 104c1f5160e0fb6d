"""Run training requests on a live device."""

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import msgspec

from pliant.deploy.device.host import Limits, ReportableProblem, read_host
from pliant.deploy.device.own_data import OwnDataReader
from pliant.deploy.device.pacing import MeasuredPacer, SimulatedPacer, explain_refusal
from pliant.deploy.device.state import (
    load_device_state,
    remove_old_states,
    save_device_state,
)
from pliant.deploy.messages import (
    DELTA,
    EXTRA,
    PARAMS,
    TrainReply,
    TrainRequest,
    decode_message,
    encode_message,
    has_own_data,
)
from pliant.deploy.settings import BYTE_LIMIT_FILE, HELLO_BYTES, MAX_WAIT_ROUNDS, Pace
from pliant.deploy.step_times import StepTimeCurve, load_or_calibrate, write_curve
from pliant.engine.local_work import iter_steps
from pliant.engine.round_tasks import LocalWork
from pliant.engine.worker_context import WorkerContext
from pliant.experiment.build import build_device_context, build_run_context
from pliant.experiment.config import Experiment
from pliant.experiment.user_code import is_user_function
from pliant.methods.base import Task, TaskKey, Update
from pliant.methods.error_feedback import compress_update
from pliant.methods.state import init_device_state
from pliant.methods.verbs import RunsAsynchronously
from pliant.nn.evaluation import evaluate_batches, make_slices
from pliant.params import Params, get_params, nbytes, select_subtree
from pliant.storage import atomic
from pliant.value import decode

log = logging.getLogger("pliant")

TEST_BATCH = 500
REQUEST_COPIES = 4  # of the network: no method sends more along with its parameters
# What a server may ask for; `options` are those of the network.
MAX_SIZES = {"epochs": 1000, "passes": 1000, "batch": 65536, "options": 65536, "size": 10**7}
ENCODE_SECONDS = 0.1  # assumed time to encode a reply, until it has been measured


@dataclass
class LoadedExperiment:
    """Everything that stays in memory between rounds."""

    digest: str
    pace: Pace
    experiment: Experiment
    context: WorkerContext
    curve: StepTimeCurve  # of mini-batches on this machine when nothing else runs
    slowdown: float | None = None  # at the end of the last round, if there was one

    @cached_property
    def has_deadline(self) -> bool:
        """Return whether a task ends with its time: it does, but for passes without rounds."""
        method = self.experiment.federated_method
        return not (isinstance(method, RunsAsynchronously) and method.work == "pass")


@dataclass
class DeviceAgent:
    """Handle requests one at a time."""

    number: int
    folder: Path
    limits: Limits
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    encode_seconds: float = ENCODE_SECONDS  # of the last reply
    on_step: Callable[[], None] = lambda: None  # called before each mini-batch
    _loaded: LoadedExperiment | None = None

    def __post_init__(self) -> None:
        self._own_data = OwnDataReader(self.limits)

    def handle_request(self, raw: bytes, queued: float = 0.0) -> bytes:
        """Handle a request and return the reply.

        The time limit starts once everything is loaded, minus the `queued` seconds that the
        request has waited for an earlier one.
        """
        header, tensors = decode_message(raw, TrainRequest)
        request: TrainRequest = msgspec.structs.replace(header, device=self.number)
        try:
            if request.kind == "hello":
                return _encode_reply(self._greet(request))
            reason = self.limits.find_refusal(read_host())
            if reason is not None:
                return self._decline(request, reason)
            loaded = self._load_experiment(request)
            if request.pace == "simulated":
                reason = explain_refusal(loaded.context, loaded.experiment, request)
                if reason is not None:
                    return self._decline(request, reason)
            context = self._select_data(loaded, request)
            if request.kind == "test":
                return _encode_reply(_test(context, request, tensors))
            return self._train(loaded, context, request, tensors, self.clock() - queued)
        except ReportableProblem as problem:  # the server continues without this device
            return self._decline(request, str(problem), kind="failed")
        except (Exception, SystemExit) as error:  # its text may name the owner's files
            log.warning("device %s failed: %s: %s", self.number, type(error).__name__, error)
            reason = f"{type(error).__name__}, see the log of the device"
            return self._decline(request, reason, kind="failed")

    def _decline(
        self, request: TrainRequest, reason: str, kind: Literal["declined", "failed"] = "declined"
    ) -> bytes:
        number, nonce = request.device, request.nonce
        return _encode_reply(TrainReply(kind, number, request.round, reason, nonce=nonce))

    def _greet(self, request: TrainRequest) -> TrainReply:
        """Report the device's speed and, if it keeps its own, its data; on battery, only these."""
        experiment, host = self._decode_experiment(request), read_host()
        declaration = None
        if has_own_data(experiment, request.pace):
            declaration = self._own_data.declare(experiment.network.image_form)
        reason = self.limits.find_refusal(host)
        if reason is not None:
            reply = TrainReply("declined", request.device, reason=reason, nonce=request.nonce)
            return msgspec.structs.replace(reply, declaration=declaration)
        loaded = self._load_experiment(request)
        slowdown = loaded.slowdown or self.limits.estimate_slowdown(host)
        points = loaded.curve.scale(slowdown).points
        reply = TrainReply("hello", request.device, curve=points, nonce=request.nonce)
        return msgspec.structs.replace(reply, declaration=declaration)

    def _decode_experiment(self, request: TrainRequest) -> Experiment:
        return decode(localise_config(request.experiment, self.limits, request.pace), Experiment)

    def _load_experiment(self, request: TrainRequest) -> LoadedExperiment:
        key = sha256(msgspec.json.encode(request.experiment)).hexdigest()[:16]
        pace = request.pace
        if self._loaded is None or (self._loaded.digest, self._loaded.pace) != (key, pace):
            experiment = self._decode_experiment(request)
            if has_own_data(experiment, pace):
                context = self._build_own_context(experiment)
            else:
                context = build_run_context(experiment, check=False)  # the server does it
            curve = load_or_calibrate(context, self.number, self.folder)
            largest = REQUEST_COPIES * nbytes(get_params(context.net.module)) + HELLO_BYTES
            atomic.write_bytes(self.folder / BYTE_LIMIT_FILE, str(largest).encode())
            self._loaded = LoadedExperiment(key, pace, experiment, context, curve)
        return self._loaded

    def _build_own_context(self, experiment: Experiment) -> WorkerContext:
        form = experiment.network.image_form
        key = TaskKey(experiment.seed, 0, self.number)
        data = self._own_data.select(form, self._own_data.declare(form), key)
        context = build_device_context(experiment, data)
        if self.limits.hide_classes and context.needs_classes:
            method = type(context.method).__name__
            raise ReportableProblem(f"expected no --classes hidden, as {method} needs the classes")
        return context

    def _select_data(self, loaded: LoadedExperiment, request: TrainRequest) -> WorkerContext:
        """Return the context of a round, with the device's data as they are now."""
        experiment = loaded.experiment
        if not has_own_data(experiment, request.pace):
            return loaded.context
        if request.declaration is None:
            raise ReportableProblem("expected the device's declaration in the request, found none")
        key = TaskKey(experiment.seed, request.round, request.device)
        form = experiment.network.image_form
        return replace(loaded.context, data=self._own_data.select(form, request.declaration, key))

    def _train(
        self,
        loaded: LoadedExperiment,
        context: WorkerContext,
        request: TrainRequest,
        tensors: Params,
        arrived_at: float,
    ) -> bytes:
        experiment = loaded.experiment
        key = TaskKey(experiment.seed, request.round, request.device)
        work, folder = context.plan_work(request.device), self.folder / loaded.digest
        remove_old_states(folder, self.limits.disk_quota, now=time.time())
        initial = init_device_state(context.method, select_subtree(tensors, PARAMS))
        device_state, residual = load_device_state(folder, request.merged_round, initial)
        task = _make_task(context, request, key, tensors, device_state)
        pacer = self._make_pacer(loaded, request, work, arrived_at)

        def choose(step: int) -> tuple[int, float] | None:
            self.on_step()
            return pacer.choose(step)

        update = context.train(task, iter_steps(context, key, choose))
        is_short = update.steps < len(work.sizes) and not context.open_passes
        is_late = experiment.rules.late == "discard" and is_short and loaded.has_deadline
        if isinstance(pacer, MeasuredPacer):
            loaded.slowdown, loaded.curve = pacer.slowdown, pacer.refine_curve()
            write_curve(loaded.curve, context, self.folder)
        groups = {}
        if not update.steps or is_late:
            update = Update(update.device, {}, 0, 0, 0.0, 0.0)
        else:
            delta, residual = compress_update(context.net, update, experiment.compression, residual)
            save_device_state(folder, request.round, update.device_state, residual)
            groups = {DELTA: delta, EXTRA: update.extra}
        ended_at = self.clock()
        reply = TrainReply(
            "update" if update.steps else "late",
            request.device,
            request.round,
            rows=tuple(pacer.rows),
            times=tuple(pacer.times),
            seconds=ended_at - arrived_at,
            samples=update.samples,
            macs=update.macs,
            loss=update.loss,
            num_samples=task.num_samples,
            short=pacer.short,
            curve=loaded.curve.scale(loaded.slowdown or 1.0).points,
            nonce=request.nonce,
        )
        raw = _encode_reply(reply, groups)
        self.encode_seconds = self.clock() - ended_at
        return raw

    def _make_pacer(
        self, loaded: LoadedExperiment, request: TrainRequest, work: LocalWork, arrived_at: float
    ) -> MeasuredPacer | SimulatedPacer:
        def clock() -> float:
            return self.clock() - arrived_at

        if request.pace == "simulated":
            return SimulatedPacer(loaded.context, loaded.experiment, request, work, clock)
        host, server_choice = read_host(), None
        if request.row is not None:
            macs, declaration = request.macs, request.declaration
            if declaration is not None:
                declared_size = loaded.context.plan_work(
                    request.device, declaration.max_samples
                ).sizes[0]
                if declared_size != work.sizes[0]:  # the device has fewer samples than a batch
                    macs *= work.sizes[0] / declared_size
            server_choice = request.row, macs
        rules = loaded.experiment.rules
        return MeasuredPacer(
            loaded.context.limit_budget(request.last_row),
            work,
            loaded.curve,
            seconds=request.seconds - self.encode_seconds,
            grace=request.seconds * (rules.grace if loaded.has_deadline else MAX_WAIT_ROUNDS - 1),
            clock=clock,
            server_choice=server_choice,
            slowdown=loaded.slowdown or self.limits.estimate_slowdown(host),
            is_partial=rules.late == "partial" or not loaded.has_deadline,
            open_passes=loaded.context.open_passes,
            cpu_share=self.limits.compute_cpu_share(host),
            sleep=self.sleep,
        )


def _encode_reply(reply: TrainReply, groups: Mapping[str, Params] | None = None) -> bytes:
    """Encode a reply, with the state of this machine's battery."""
    host = read_host()
    reply = msgspec.structs.replace(reply, charge=host.charge, is_charging=host.is_charging)
    return encode_message(reply, groups)


def _make_task(
    context: WorkerContext, request: TrainRequest, key: TaskKey, tensors: Params, device_state: Any
) -> Task:
    """Return the task of a request, with what the device itself knows of its data."""
    num_samples, classes = context.summarise_data(request.device)
    if request.declaration is not None:
        classes = request.declaration.classes or ()
    return Task(
        key,
        select_subtree(tensors, PARAMS),
        request.lr,
        context.subnet_to_send(request.row or 0, key),
        select_subtree(tensors, EXTRA),
        device_state,
        num_samples,
        classes,
    )


def _test(context: WorkerContext, request: TrainRequest, tensors: Params) -> TrainReply:
    """Test a network on the device's own test images, of which no more than declared."""
    tests, declaration = context.data.test, request.declaration
    count = min(len(tests), 0 if declaration is None else declaration.tests)
    batches = (
        (tests.get_normalised(part), tests.labels[part]) for part in make_slices(count, TEST_BATCH)
    )
    params, module = select_subtree(tensors, PARAMS), context.net.module
    totals = evaluate_batches(module, params, batches, tests.classes)
    correct = totals.num_correct
    reply = TrainReply("score", request.device, request.round, nonce=request.nonce)
    return msgspec.structs.replace(reply, tests=count, correct=correct)


def localise_config(config: Any, limits: Limits, pace: Pace = "measured") -> Any:
    """Point a config at this device's folders; refuse code and data its owner has not allowed.

    Refuse also what no honest server asks for, such as a thousand times the data.
    """
    _check_sizes(config)
    data, network, method = (dict(config[key]) for key in ("data", "network", "method"))
    data["root"] = limits.data
    if network.get("input") and pace == "measured":
        data = {}  # the device has its own
    for section, key in ((data, "name"), (network, "name"), (method, "code")):
        name = section.get(key, "")
        if is_user_function(name):
            path, _, function = name.rpartition(":")
            if limits.code is None:
                raise ReportableProblem(f"expected --code FOLDER on the device for {name!r}")
            if Path(path).suffix != ".py":
                raise ReportableProblem(f"expected FILE.py:FUNCTION for a device, got {name!r}")
            section[key] = f"{Path(limits.code) / Path(path).name}:{function}"
    fleet = _localise_traces(config["fleet"], limits, pace)
    return config | {"data": data, "network": network, "method": method, "fleet": fleet}


def _check_sizes(section: Any, name: str = "") -> None:
    """Raise ValueError if a number asks for more work or memory than any experiment needs."""
    if isinstance(section, dict):
        for key, item in section.items():
            _check_sizes(item, "options" if name == "options" else key)
    elif isinstance(section, list | tuple):
        for item in section:
            _check_sizes(item, name)
    elif isinstance(section, int | float) and not abs(section) <= MAX_SIZES.get(name, math.inf):
        raise ReportableProblem(f"expected at most {MAX_SIZES[name]} for {name!r}, got {section}")


def _localise_traces(section: Any, limits: Limits, pace: Pace) -> Any:
    """Read recordings from the owner's folder; a device that measures itself needs none."""
    if isinstance(section, list | tuple):
        return [_localise_traces(item, limits, pace) for item in section]
    if not isinstance(section, dict):
        return section
    if "path" not in section:
        return {name: _localise_traces(item, limits, pace) for name, item in section.items()}
    if pace == "measured":
        return {"type": "constant", "low": 1.0}
    if limits.data is None:
        raise ReportableProblem(f"expected --data FOLDER on the device for {section['path']!r}")
    return section | {"path": str(Path(limits.data) / Path(section["path"]).name)}
