"""The requests of tasks: the network, and what the server decides about each task."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from secrets import token_hex
from typing import Any

import numpy as np

from pliant.deploy.messages import (
    EXTRA,
    PARAMS,
    SharedEncoder,
    TrainReply,
    TrainRequest,
    decode_message,
)
from pliant.deploy.server.replies import NONCE_BYTES, MessageTransport, SentRequest
from pliant.deploy.settings import Pace
from pliant.deploy.step_times import StepTimeCurve, parse_curve
from pliant.devices import DeviceStatus
from pliant.engine.local_work import Job, make_task
from pliant.engine.round_loop import Run
from pliant.engine.round_tasks import RoundTasks
from pliant.engine.task_costs import find_fitting_rows
from pliant.engine.timetable import compute_start_status
from pliant.methods.base import TaskKey
from pliant.params import Params


@dataclass(frozen=True)
class TaskOrder:
    """What the server decides about a task, besides the network."""

    key: TaskKey
    lr: float
    last_row: int | None  # that the device may choose; None: any
    row: int | None = None  # if the server chooses it
    macs: float = 0.0  # of the first mini-batch, if the server chooses the row
    steps: tuple[tuple[int, float], ...] = ()  # row and MACs of each, if they are planned


class Requester:
    """Make the requests of a run's tasks."""

    def __init__(self, config: Any, pace: Pace, messages: MessageTransport) -> None:
        self._config, self._pace, self._messages = config, pace, messages
        self._encoder = SharedEncoder()
        self.curves: dict[int, StepTimeCurve] = {}  # reported by devices

    def make_request(
        self, run: Run, order: TaskOrder, shared: Params, seconds: float
    ) -> SentRequest:
        """Return the encoded request of one task, and what a valid reply to it looks like."""
        context, key, device = run.context, order.key, order.key.device
        work = context.plan_work(device)
        job = Job(
            key, (order.row or 0,), (order.macs,), order.lr, None, *context.summarise_data(device)
        )
        full_macs = [size * work.full_macs for size in work.sizes]
        # some charge for more than one pass
        factor = max(context.find_max_share(order.last_row), order.macs / full_macs[0])
        max_macs = [factor * step_macs for step_macs in full_macs]
        manifest = run.manifests.build(shared, job, work.sizes, max_macs)
        last = run.state.device_states.get(device)
        request = TrainRequest(
            "train",
            self._config,
            device,
            key.round,
            order.lr,
            self._pace,
            order.row,
            order.macs,
            seconds,
            None if last is None else last.merged,
            order.last_row,
            nonce=token_hex(NONCE_BYTES),
            declaration=run.state.declarations.get(device),
            steps=order.steps,
        )
        task = make_task(context, shared, job)
        raw = self._encoder.encode(request, {PARAMS: task.params, EXTRA: task.extra})
        return SentRequest(
            key, order.row, order.last_row, task.extra, raw, manifest, request.nonce, factor
        )

    def choose_rows(self, run: Run, devices: list[int]) -> Mapping[int, tuple[int, float]]:
        """Choose rows by the devices' reported speeds, if the method chooses on the server."""
        policy = run.context.budget_policy
        if not policy.is_per_round or not devices:
            return {}
        full_macs = run.context.compute_batch_sizes(np.array(devices)) * run.context.full_macs
        zero = np.zeros(len(devices))
        tasks = RoundTasks(np.array(devices), full_macs, zero, zero)
        if self._pace == "simulated":
            costs = run.fleet.get_costs(tasks.devices, seed=run.settings.seed)
            fits = find_fitting_rows(run.context, costs, tasks.devices)
            tasks = replace(tasks, fits=fits)
            start = run.state.next_round * run.fleet.round_seconds
            status = compute_start_status(run.fleet, tasks, seed=run.settings.seed, start=start)
        else:
            status = self._estimate_status(tasks, run.fleet.round_seconds)
        choice = policy.choose(status)
        rows = zip(choice.row.tolist(), choice.macs.tolist(), strict=True)
        return dict(zip(devices, rows, strict=True))

    def _estimate_status(self, tasks: RoundTasks, round_seconds: float) -> DeviceStatus:
        first_macs, total_macs = tasks.full_macs[:, 0], tasks.full_macs.sum(axis=1)
        speed = total_macs / round_seconds
        for index, device in enumerate(tasks.devices.tolist()):
            curve = self.curves.get(device) or self._read_hello_curve(device)
            if curve is not None:
                slot = round_seconds * first_macs[index] / total_macs[index]
                speed[index] = curve.share_within(slot) * first_macs[index] / slot
        left, now = np.full(len(speed), round_seconds), np.zeros(len(speed))
        return DeviceStatus(
            tasks.devices, 0, now, speed, left, round_seconds, first_macs, total_macs, total_macs
        )

    def _read_hello_curve(self, device: int) -> StepTimeCurve | None:
        try:
            hello, _ = decode_message(self._messages.hello_replies[device], TrainReply)
            return parse_curve(hello.curve)
        except (LookupError, ValueError):
            return None
