"""Make the ledger record of a task on a real device: its MACs, bytes, seconds and joules."""

import numpy as np

from pliant.deploy.server.reply_validation import CheckedReply, SentRequest
from pliant.devices import compute_joules
from pliant.engine.ledger import MERGED_OUTCOMES, TaskRecord
from pliant.engine.round_loop import Run


def make_task_record(
    run: Run, request: SentRequest, reply: CheckedReply | None, outcome: str, wait_seconds: float
) -> TaskRecord:
    """Return a task's record; its request was sent `wait_seconds` into the round."""
    device = request.key.device
    report = None if reply is None else reply.reply
    rows = () if report is None else report.rows
    is_merged = outcome in MERGED_OUTCOMES
    macs = sum(
        size * run.context.step_macs(row, request.key, step)
        for step, (row, size) in enumerate(zip(rows, request.work.sizes, strict=False))
    )
    times: list[float] = []
    if report is not None and reply is not None:
        # the work took as long as the device says, and ended when the reply arrived
        times = [wait_seconds + reply.arrival - report.seconds + time for time in report.times]
    busy = times[-1] - times[0] if rows else 0.0
    up = 0 if reply is None else reply.size
    costs = run.fleet.get_costs(np.array([device]), seed=run.settings.seed)
    traffic = np.array([float(len(request.raw) + up)])
    update = reply.update if reply is not None and is_merged else None
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
        up=up,
        seconds=busy,
        joules=float(compute_joules(costs, np.array([macs]), traffic)[0]),
        loss=update.loss if update else None,
        starts=tuple(times[:-1]) if rows else (),
        ends=tuple(times[1:]) if rows else (),
        rows=tuple(rows),
        short=0 if report is None else max(0, min(report.short, len(rows))),
    )
