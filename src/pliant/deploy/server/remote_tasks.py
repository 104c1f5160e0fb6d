"""Rehearse an asynchronous run: real devices train the tasks, and virtual time orders them."""

from dataclasses import replace

from pliant.deploy.server.replies import (
    LATE,
    CheckedReply,
    SentRequest,
    check_reply,
)
from pliant.deploy.server.requests import TaskOrder
from pliant.deploy.server.rounds import (
    POLL_SECONDS,
    DeviceTransport,
    MergedRound,
    NotEnoughDevices,
)
from pliant.engine.round_loop import Run
from pliant.engine.run_store import TaskInFlight
from pliant.methods.base import Update
from pliant.params import Params


class RemoteTasks:
    """Let real devices train the tasks of a run in virtual time.

    A task whose device is lost or declines is sent again, so the run equals the simulation.
    """

    def __init__(self, devices: DeviceTransport) -> None:
        self._devices, self._messages = devices, devices.messages
        self._requests: dict[int, tuple[SentRequest, float]] = {}  # and when they were sent
        self._replies: dict[int, CheckedReply] = {}

    def start(self, run: Run, task: TaskInFlight, shared: Params) -> None:
        policy, row, macs = run.context.budget_policy, None, 0.0
        if policy.is_per_round:  # as the server chooses the row of a round
            row, macs = task.rows[0], task.macs[0]
        steps = tuple(zip(task.rows, task.macs, strict=True))
        order = TaskOrder(task.key, task.lr, task.last_row, row, macs, steps)
        seconds = run.fleet.round_seconds
        request = self._devices.requester.make_request(run, order, shared, seconds)
        self._send(run, request)

    def finish(
        self, run: Run, task: TaskInFlight, shared: Params
    ) -> tuple[Update | None, str | None]:
        for _ in range(self._devices.settings.retries + 1):
            reply = self._wait_for_reply(run, task.key.device)
            if reply.update is not None:
                return replace(reply.update, device_state=MergedRound(task.key.round)), None
            if reply.outcome.startswith("rejected"):
                return None, reply.outcome.removeprefix("rejected: ")
            self.start(run, task, shared)
        raise NotEnoughDevices(f"device {task.key.device} sent no update: {reply.outcome}")

    def forget_versions(self, needed: set[int]) -> None:
        """Keep nothing: a request has all that its reply is checked against."""

    def cancel(self) -> None:
        self._requests, self._replies = {}, {}

    def _send(self, run: Run, request: SentRequest) -> None:
        """Send a request once its device is online."""
        device, start = request.key.device, self._devices.clock()
        while device not in self._devices.find_ready_devices(run):
            if self._devices.clock() - start > self._devices.settings.patience:
                raise NotEnoughDevices(f"expected device {device} online, got none")
            self._devices.sleep(POLL_SECONDS)
        self._requests[device] = request, self._devices.clock()
        self._messages.send(
            {device: request.raw}, round=request.key.round, seconds=self._window(run), adds=True
        )

    def _window(self, run: Run) -> float:
        """Return how long a device may take, which works at its own speed here."""
        settings = self._devices.settings
        return max(settings.patience, run.fleet.round_seconds + settings.allowance)

    def _wait_for_reply(self, run: Run, device: int) -> CheckedReply:
        """Return the reply of one device; keep those of others."""
        while device not in self._replies:
            for message in self._messages.poll_replies():
                if message.device in self._requests:
                    request, sent_at = self._requests.pop(message.device)
                    arrival = self._devices.clock() - sent_at
                    self._replies[message.device] = check_reply(run, request, message, arrival)
            if device not in self._replies:
                self._devices.find_ready_devices(run)  # greets those that return
                elapsed = self._devices.clock() - self._requests[device][1]
                if device in self._messages.find_lost_devices() or elapsed > self._window(run):
                    del self._requests[device]
                    return CheckedReply(device, elapsed, 0, None, LATE)
                self._devices.sleep(POLL_SECONDS)
        return self._replies.pop(device)
