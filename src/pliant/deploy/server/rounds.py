"""Run rounds on real devices: select, send, wait, validate, merge, evaluate, save.

Selection, validation, merging, ledger and checkpoints are shared with the simulator. The clock is
not: a round ends at its deadline, whatever the devices do.
"""

import time
from collections.abc import Callable, Iterator
from itertools import takewhile
from pathlib import Path

import msgspec
import torch

from pliant.deploy.server.reply_validation import CheckedReply, SentRequest, check_reply
from pliant.deploy.server.run_state import (
    LAST_MERGED,
    MAX_WAIT_ROUNDS,
    POLL_SECONDS,
    ServerRun,
    decide_merge,
    evaluate_state,
    make_requests,
    select_online_devices,
)
from pliant.deploy.server.run_state import NotEnoughDevices as NotEnoughDevices
from pliant.deploy.server.task_record import make_task_record
from pliant.deploy.server.transport import Transport
from pliant.deploy.settings import ServerSettings
from pliant.engine.ledger import RoundRecord, TaskRecord, sum_tasks
from pliant.engine.local_work import WorkerContext
from pliant.engine.round_rules import RoundRules
from pliant.engine.run_store import RunState, RunStore, read_records
from pliant.experiment.config import Experiment
from pliant.methods.base import ServerState
from pliant.params import digest, get_params


def serve(
    experiment: Experiment,
    context: WorkerContext,
    transport: Transport,
    folder: Path,
    settings: ServerSettings,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[RoundRecord]:
    """Run the remaining rounds of the run in a folder and yield their records."""
    store = RunStore(folder)
    try:
        saved = store.resume() or RunState(0, 0.0, ServerState(get_params(context.net.module)), {})
        run = ServerRun(experiment, context, transport, settings, saved, clock, sleep)
        is_empty = [r.merged == 0 for r in read_records(folder) if isinstance(r, RoundRecord)]
        run.empty_rounds = sum(is_empty)
        consecutive = len(list(takewhile(bool, reversed(is_empty))))
        # a run that has given up may retry as often again
        run.consecutive_empty_rounds = consecutive % (settings.retries + 1)
        while run.run_state.next_round < experiment.rounds + run.empty_rounds:
            tasks, record = _run_round(run)
            store.append([*tasks, record])
            store.save(run.run_state)  # every round, so that no merged update is ever lost
            yield record
            if run.consecutive_empty_rounds > settings.retries:
                raise NotEnoughDevices(
                    f"no update was merged in {run.consecutive_empty_rounds} consecutive rounds"
                )
    finally:
        store.close()


def _run_round(run: ServerRun) -> tuple[list[TaskRecord], RoundRecord]:
    number, experiment = run.run_state.next_round, run.experiment
    opened_at = run.clock()
    devices = select_online_devices(run, number)
    requests = make_requests(run, number, devices)
    sent_at = run.clock()
    replies = _exchange_messages(run, number, requests, sent_at)
    closed_at = run.clock()
    decision = decide_merge(run, requests, replies)
    merged = [reply.update for reply in replies.values() if reply.device in decision.merged]
    updates = sorted((u for u in merged if u is not None), key=lambda update: update.device)
    state = run.context.method.merge(run.context.net, run.run_state.server_state, updates)
    start = run.run_state.seconds
    seconds = start + (closed_at - opened_at)
    device_states = run.run_state.device_states | {
        update.device: {LAST_MERGED: torch.tensor(number)} for update in updates
    }
    run.run_state = RunState(number + 1, seconds, state, device_states)
    waited = sent_at - opened_at
    tasks = [
        make_task_record(
            run.context, experiment, request, replies.get(device), decision.outcomes[device], waited
        )
        for device, request in sorted(requests.items())
    ]
    record = sum_tasks(number, seconds, tasks)
    record = msgspec.structs.replace(record, dispatched_at=start + waited)
    run.empty_rounds += not updates
    run.consecutive_empty_rounds = 0 if updates else run.consecutive_empty_rounds + 1
    is_last = number + 1 == experiment.rounds + run.empty_rounds
    if is_last or (number + 1) % experiment.evaluation.every == 0:
        score, trained_score = evaluate_state(run.context, state, experiment.evaluation)
        record = msgspec.structs.replace(record, score=score, trained_score=trained_score)
    if is_last:
        record = msgspec.structs.replace(record, digest=digest(state.params))
    return tasks, record


def _exchange_messages(
    run: ServerRun, round: int, requests: dict[int, SentRequest], started_at: float
) -> dict[int, CheckedReply]:
    """Send all requests; collect replies until all or enough are in, or the deadline passes."""
    rules, round_seconds = run.experiment.rules, run.experiment.fleet.round_seconds
    window = round_seconds * (1 + rules.grace) + run.settings.allowance
    if rules.late == "wait":
        window = round_seconds * MAX_WAIT_ROUNDS
    raw_requests = {device: request.raw for device, request in requests.items()}
    run.transport.send(raw_requests, round=round, seconds=window)
    replies: dict[int, CheckedReply] = {}
    while len(replies) < len(requests) and run.clock() - started_at < window:
        for message in run.transport.poll_replies():
            device, arrival = message.device, run.clock() - started_at
            policy = run.experiment.guard
            reply = check_reply(run.context, message, requests[device], policy, arrival)
            replies[device] = reply
            if reply.curve is not None:
                run.curves[device] = reply.curve
        mergeable = sum(_is_mergeable(requests[d], reply, rules) for d, reply in replies.items())
        if rules.closes_at_target and mergeable >= run.experiment.per_round:
            break
        if len(replies) < len(requests):
            run.sleep(POLL_SECONDS)
    return replies


def _is_mergeable(request: SentRequest, reply: CheckedReply, rules: RoundRules) -> bool:
    """Return whether a reply can be merged: unfinished work only if partial updates count."""
    if reply.update is None:
        return False
    return rules.late == "partial" or reply.update.steps == len(request.work.sizes)
