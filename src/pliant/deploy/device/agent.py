"""Run training requests on a live device."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from pliant.deploy.device.calibration import (
    load_or_calibrate,
    make_example_batch,
    to_points,
    write_curve,
)
from pliant.deploy.device.host import (
    Limits,
    compute_cpu_share,
    estimate_slowdown,
    find_refusal,
    read_host,
)
from pliant.deploy.device.pacing import MeasuredPacer
from pliant.deploy.device.simulated_pacing import SimulatedPacer
from pliant.deploy.device.state import DeviceStateStore
from pliant.deploy.messages import (
    DELTA,
    EXTRA,
    PARAMS,
    TrainReply,
    TrainRequest,
    decode_request,
    encode_message,
)
from pliant.deploy.settings import Pace
from pliant.deploy.step_times import StepTimeCurve
from pliant.engine.local_work import LocalWork, WorkerContext, build_context, iter_steps
from pliant.experiment.build import build_experiment
from pliant.experiment.config import Experiment
from pliant.experiment.user_code import is_user_function
from pliant.methods.base import Task, TaskKey, Update
from pliant.methods.error_feedback import compress_update
from pliant.methods.state import init_device_state
from pliant.value import decode

ENCODE_SECONDS = 0.1  # assumed time to encode a reply, until it has been measured


@dataclass
class LoadedExperiment:
    """Everything that stays in memory between rounds."""

    digest: str
    pace: Pace
    experiment: Experiment
    context: WorkerContext
    curves: dict[int, StepTimeCurve] = field(default_factory=dict)  # by device
    slowdown: float | None = None  # at the end of the last round, if there was one


class DeviceAgent:
    """Handle requests one at a time."""

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
        self._encode_seconds = ENCODE_SECONDS
        self._loaded: LoadedExperiment | None = None

    def handle_request(self, raw: bytes, queued: float = 0.0) -> bytes:
        """Handle a request and return the reply.

        The time limit starts once everything is loaded, minus the `queued` seconds that the
        request has waited for an earlier one.
        """
        request, tensors = decode_request(raw)
        request = msgspec.structs.replace(request, device=self._number)
        try:
            reason = find_refusal(self._limits, read_host())
            if reason is not None:
                return encode_message(TrainReply("declined", request.device, request.round, reason))
            loaded = self._load_experiment(request.experiment, request.pace)
            curve = self._load_curve(loaded, request.device)
            if request.kind == "hello":
                slowdown = loaded.slowdown or estimate_slowdown(self._limits, read_host())
                points = to_points(curve.scale(slowdown))
                return encode_message(TrainReply("hello", request.device, curve=points))
            return self._train(loaded, request, tensors, self._clock() - queued)
        except Exception as error:  # the server continues without this device
            reason = f"{type(error).__name__}: {error}"
            return encode_message(TrainReply("failed", request.device, request.round, reason))

    def _load_experiment(self, config: Any, pace: Pace) -> LoadedExperiment:
        key = sha256(msgspec.json.encode(config)).hexdigest()[:16]
        if self._loaded is None or (self._loaded.digest, self._loaded.pace) != (key, pace):
            experiment = decode(localise_config(config, self._limits, pace), Experiment)
            context = build_context(*build_experiment(experiment), experiment.federated_method)
            self._loaded = LoadedExperiment(key, pace, experiment, context)
        return self._loaded

    def _load_curve(self, loaded: LoadedExperiment, device: int) -> StepTimeCurve:
        """Return how long mini-batches take on this machine when nothing else runs."""
        if device not in loaded.curves:
            context, batch = loaded.context, loaded.context.method.local.batch
            samples = context.data.train.select(context.get_share(device)[:batch])
            x, y = make_example_batch(samples.get_normalised(), samples.labels, batch)
            loaded.curves[device] = load_or_calibrate(context.net, x, y, self._folder)
        return loaded.curves[device]

    def _train(
        self,
        loaded: LoadedExperiment,
        request: TrainRequest,
        tensors: dict[str, Any],
        arrived_at: float,
    ) -> bytes:
        context, experiment = loaded.context, loaded.experiment
        key = TaskKey(experiment.seed, request.round, request.device)
        work = context.plan_work(request.device)
        store = DeviceStateStore(self._folder / loaded.digest)
        params = tensors.get(PARAMS, {})
        initial = init_device_state(context.method, params)
        device_state, residual = store.load(request.merged_round, initial)
        row = 0 if request.row is None else request.row
        task = Task(
            key,
            params,
            request.lr,
            context.subnet_to_send(row, key),
            tensors.get(EXTRA, {}),
            device_state,
            *context.summarise_data(request.device),
        )
        pacer = self._make_pacer(loaded, request, work, arrived_at)
        update = context.train(task, iter_steps(context, key, pacer.choose))
        is_late = experiment.rules.late == "discard" and update.steps < len(work.sizes)
        if isinstance(pacer, MeasuredPacer):
            loaded.slowdown = pacer.slowdown
            curve = loaded.curves[request.device] = pacer.refine_curve()
            write_curve(curve, context.net, context.method.local.batch, self._folder)
        if not update.steps or is_late:
            update, groups = _make_empty_update(update), {}
        else:
            delta, residual = compress_update(context.net, update, request.compression, residual)
            store.save(request.round, update.device_state, residual)
            groups = {DELTA: delta, EXTRA: update.extra}
        ended_at = self._clock()
        reply = self._make_reply(loaded, request, update, pacer, ended_at - arrived_at)
        raw = encode_message(reply, groups)
        self._encode_seconds = self._clock() - ended_at
        return raw

    def _make_reply(
        self,
        loaded: LoadedExperiment,
        request: TrainRequest,
        update: Update,
        pacer: "MeasuredPacer | SimulatedPacer",
        seconds: float,
    ) -> TrainReply:
        curve = self._load_curve(loaded, request.device).scale(loaded.slowdown or 1.0)
        return TrainReply(
            "update" if update.steps else "late",
            request.device,
            request.round,
            rows=tuple(pacer.rows),
            times=tuple(pacer.times),
            seconds=seconds,
            samples=update.samples,
            macs=update.macs,
            loss=update.loss,
            num_samples=update.num_samples,
            short=pacer.short,
            curve=to_points(curve),
        )

    def _make_pacer(
        self, loaded: LoadedExperiment, request: TrainRequest, work: LocalWork, arrived_at: float
    ) -> "MeasuredPacer | SimulatedPacer":
        def clock() -> float:
            return self._clock() - arrived_at

        if request.pace == "simulated":
            return SimulatedPacer(loaded.context, loaded.experiment, request, work, clock)
        host = read_host()
        return MeasuredPacer(
            loaded.context.budget_policy,
            work,
            self._load_curve(loaded, request.device),
            seconds=request.seconds - self._encode_seconds,
            clock=clock,
            server_choice=None if request.row is None else (request.row, request.macs),
            slowdown=loaded.slowdown or estimate_slowdown(self._limits, host),
            is_partial=loaded.experiment.rules.late == "partial",
            cpu_share=compute_cpu_share(self._limits, host),
            sleep=self._sleep,
        )


def localise_config(config: Any, limits: Limits, pace: Pace = "measured") -> Any:
    """Point a config at this device's folders; refuse code and data its owner has not allowed."""
    data, network, method = (dict(config[key]) for key in ("data", "network", "method"))
    data["root"] = limits.data
    for section, key in ((data, "name"), (network, "name"), (method, "code")):
        name = section.get(key, "")
        if is_user_function(name):
            path, _, function = name.rpartition(":")
            if limits.code is None:
                raise ValueError(f"expected --code FOLDER on the device for {name!r}")
            if Path(path).suffix != ".py":
                raise ValueError(f"expected FILE.py:FUNCTION for a device, got {name!r}")
            section[key] = f"{Path(limits.code) / Path(path).name}:{function}"
    fleet = _localise_traces(config["fleet"], limits, pace)
    return config | {"data": data, "network": network, "method": method, "fleet": fleet}


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
        raise ValueError(f"expected --data FOLDER on the device for {section['path']!r}")
    return section | {"path": str(Path(limits.data) / Path(section["path"]).name)}


def _make_empty_update(update: Update) -> Update:
    return Update(update.device, {}, 0, 0, 0.0, 0.0)
