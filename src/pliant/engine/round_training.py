"""Train the tasks of a simulated round that count, and merge their updates as they come."""

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from pliant.engine.local_work import Job
from pliant.engine.round_loop import Run
from pliant.engine.timetable import Timetable
from pliant.engine.worker_context import WorkerContext
from pliant.methods.aggregation import MispredictedWeights, UpdateStream
from pliant.methods.base import TaskKey, Update, count_steps
from pliant.methods.validation import UpdateManifest, accept_valid
from pliant.params import Params
from pliant.workers.pool import Pool


@dataclass(frozen=True)
class TrainedRound:
    """The valid updates of a round in device order, and what they led to."""

    updates: list[Update]  # without tensors if they are merged
    rejections: dict[int, str]  # reasons, by device
    device_states: dict[int, Any]
    residuals: dict[int, Params]
    server_state: Any = None  # if the updates are merged


def train_round(run: Run, pool: Pool[Job, Update], jobs: Sequence[Job]) -> TrainedRound:
    """Run the jobs, validate their updates and, if the method allows it, merge them as they come.

    Then at most two updates per worker wait. The others are kept: those of methods that compare
    them all, and those of devices with test images of their own, on which each is evaluated.
    """
    context, shared = run.context, run.shared_params
    trained = TrainedRound([], {}, {}, {})
    if context.data.test_shares or not context.merges_stream:
        trained.updates.extend(_iter_valid(run, pool, shared, jobs, trained))
        return trained
    planned = [_plan_update(context, job) for job in jobs]
    while True:
        with closing(_iter_valid(run, pool, shared, jobs, trained)) as updates:
            stream = UpdateStream(planned, updates)
            try:
                server_state = run.merge(stream)
            except MispredictedWeights:
                # rejected ones are missing: train the others again, as all weights are known now
                planned, valid = stream.seen, {update.device for update in stream.seen}
                jobs = [job for job in jobs if job.key.device in valid]
                continue
            for _ in stream:  # a merge need not read them all
                pass
        return replace(trained, updates=stream.seen, server_state=server_state)


def _iter_valid(
    run: Run, pool: Pool[Job, Update], shared: Params, jobs: Sequence[Job], trained: TrainedRound
) -> Generator[Update, None, None]:
    """Run the jobs and yield their valid updates; note in `trained` what else they lead to."""
    with closing(pool.stream(jobs, shared)) as replies:
        for job, reply in zip(jobs, replies, strict=True):
            device, manifest = job.key.device, make_manifest(run, shared, job)
            update, reason = accept_valid(reply, manifest, run.settings.guard)
            if update is None:
                trained.rejections[device] = str(reason)
                continue
            if update.device_state is not None:
                trained.device_states[device] = update.device_state
            if update.residual:
                trained.residuals[device] = update.residual
            yield update


def _plan_update(context: WorkerContext, job: Job) -> Update:
    """Return what is known of an update before it is trained."""
    key, steps = job.key, len(job.rows)
    work = context.plan_work(key.device, job.num_samples)
    sizes = zip(job.rows, work.sizes, strict=False)
    samples = sum(context.scale_inputs(row).count_samples(size) for row, size in sizes)
    macs = [*accumulate(job.macs, initial=0.0)][-1]  # in the order of a device
    subnets = []
    if context.filter_selector is not None:  # which may weight devices by what they train
        subnets = [context.select_subnet(row, key, step) for step, row in enumerate(job.rows)]
    return Update(
        key.device,
        {},
        samples,
        steps,
        macs,
        0.0,
        num_samples=job.num_samples,
        subnet_steps=count_steps(subnets),
    )


def make_jobs(run: Run, timetable: Timetable) -> list[Job]:
    """Return the jobs of the next round's tasks whose updates count, in device order."""
    seed, number = run.settings.seed, run.state.next_round
    tasks = zip(timetable.devices.tolist(), list_used_steps(timetable), strict=True)
    return [
        make_job(run, TaskKey(seed, number, device), rows, macs)
        for device, (rows, macs) in tasks
        if rows
    ]


def list_used_steps(timetable: Timetable) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    """Return the rows and planned MACs of the steps of each task that the server gets."""
    columns = timetable.row.tolist(), timetable.planned.tolist(), timetable.used_steps.tolist()
    return [(tuple(rows[:n]), tuple(macs[:n])) for rows, macs, n in zip(*columns, strict=True)]


def make_job(
    run: Run,
    key: TaskKey,
    rows: tuple[int, ...],
    macs: tuple[float, ...],
    *,
    sent_at: float | None = None,
) -> Job:
    """Return the job of a task with these rows and planned MACs, sent now or at another time."""
    device, state = key.device, run.state
    summary = run.context.summarise_data(device, state.seconds if sent_at is None else sent_at)
    upload = run.settings.compression, state.residuals.get(device, {})
    return Job(
        key, rows, macs, run.compute_lr(device), state.device_states.get(device), *summary, *upload
    )


def make_manifest(run: Run, shared: Params, job: Job) -> UpdateManifest:
    """Return what a valid update for a job looks like."""
    sizes = run.context.plan_work(job.key.device, job.num_samples).sizes[: len(job.rows)]
    # a method may charge several passes
    max_macs = [
        max(size * run.context.full_macs, macs) for size, macs in zip(sizes, job.macs, strict=True)
    ]
    return run.manifests.build(shared, job, sizes, max_macs)
