"""Simulate federated training in virtual time."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from torch import nn

from pliant.data import FederatedData
from pliant.devices import Fleet
from pliant.engine.async_loop import AsyncDevices, PooledTasks
from pliant.engine.checks import (
    check_asynchronous,
    check_average,
    check_privacy,
    check_step_time,
    check_trainable,
)
from pliant.engine.ledger import RoundRecord
from pliant.engine.local_work import run_job
from pliant.engine.round_loop import Run, RunSettings, Transport, run_rounds
from pliant.engine.run_inputs import check_inputs, describe_inputs, describe_method
from pliant.engine.run_store import RunState, RunStore
from pliant.engine.simulated_devices import SimulatedDevices
from pliant.engine.worker_context import (
    InputFactory,
    WorkerContext,
    build_context,
    build_worker_context,
)
from pliant.methods.state import init_states
from pliant.methods.verbs import LimitsRows, Method, RunsAsynchronously, get_inner_method
from pliant.nn.sites import ElasticOptions
from pliant.params import get_params
from pliant.storage import run_dir
from pliant.value import encode
from pliant.workers.pool import AnyWorkers, InlineWorkers, open_pool, preload_modules

T = TypeVar("T")


def simulate(
    method: Method,
    net: nn.Module,
    data: FederatedData,
    fleet: Fleet,
    *,
    rounds: int | None = None,
    settings: RunSettings | None = None,
    workers: AnyWorkers | None = None,
    folder: str | Path | None = None,
    make_inputs: InputFactory | None = None,
    is_stopped: Callable[[], bool] = lambda: False,
    elastic_options: ElasticOptions | None = None,
) -> Iterator[RoundRecord]:
    """Train a network across a fleet and yield a record of every round.

    The rounds of an asynchronous method are its merges: versions of the network.

    With a `folder`, the run writes its records and checkpoints there and resumes from the newest
    checkpoint; `load_trained_params(folder)` returns the trained network. A folder with a run of
    another method, network, data, fleet or settings is refused; more rounds than before continue a
    run unless its learning rate follows a schedule. `make_inputs` rebuilds the network and the data
    in worker processes, where that is cheaper than copying them. When `is_stopped` returns true,
    the run saves a checkpoint and ends. `elastic_options` say which layers can be narrowed.

    >>> import torch
    >>> import pliant as pl
    >>> images = pl.ImageDataset.from_tensors(torch.rand(40, 1, 28, 28), torch.arange(40) % 10)
    >>> data = pl.data.TrainTestData(images, images).share(pl.Iid(), devices=4, proxy=8)
    >>> fleet = pl.Fleet(size=4, speed=pl.ChangingTrace(low=0.25, high=1.0, per_round=2.0))
    >>> settings = pl.RunSettings(rounds=2, per_round=2, rules=pl.RoundRules(late="partial"))
    >>> rounds = pl.simulate(pl.Distreal(), pl.models.digits_cnn(), data, fleet, settings=settings)
    >>> [record.tasks for record in rounds]
    [2, 2]
    """
    settings, workers = settings or RunSettings(), workers or InlineWorkers()
    if rounds is not None:
        settings = msgspec.structs.replace(settings, rounds=rounds)
    options = elastic_options or ElasticOptions()
    check_asynchronous(method, settings, fleet)
    check_average(method, settings)
    check_trainable(method, net, data, settings.evaluation, options)
    check_privacy(method, net, settings)
    check_step_time(method, settings, fleet)
    inner = get_inner_method(method)
    server_state, device_state = init_states(inner, get_params(net))  # may fail: before the folder
    folder = None if folder is None else Path(folder)
    store = None if folder is None else RunStore(folder)
    try:
        if folder is not None and not (folder / run_dir.CONFIG_FILE).exists():
            run_dir.create_run_dir(folder, _describe_run(method, net, data, fleet, settings))
        preload_modules(workers, run_job.__module__)
        context = build_context(net, data, inner, options, step_time=settings.step_time)
        make_own = make_inputs or partial(_return, (net, data))
        build_own = partial(build_worker_context, make_own, inner, options)
        is_inline = isinstance(workers, InlineWorkers)  # it shares this network
        with open_pool(
            workers, partial(_return, context) if is_inline else build_own, run_job
        ) as pool:
            if folder is not None:
                _check_folder(folder, method, context, fleet, settings)
            state = store.resume(type(server_state), type(device_state)) if store else None
            run = Run(context, fleet, settings, state or RunState(0, 0.0, server_state, {}))
            devices: Transport = SimulatedDevices(pool)
            if isinstance(method, RunsAsynchronously):
                devices = AsyncDevices(PooledTasks(pool), method)
            yield from run_rounds(run, devices, store, is_stopped)
    finally:
        if store:
            store.close()


def _check_folder(
    folder: Path, method: Method, context: WorkerContext, fleet: Fleet, settings: RunSettings
) -> None:
    """Refuse a folder with another run; a run in a new folder stores what it starts with."""
    inputs = describe_inputs(method, context.net.fingerprint, context.data, fleet, settings)
    check_inputs(folder, inputs, rounds_dependency=_find_rounds_dependency(method))


def _describe_run(
    method: Method, net: nn.Module, data: FederatedData, fleet: Fleet, settings: RunSettings
) -> dict[str, Any]:
    """Return the config of a run that was started from Python, as reports read it."""
    config: dict[str, Any] = encode(settings)
    return config | {
        "method": describe_method(method),
        "fleet": encode(fleet),
        "network": {"name": type(net).__name__},
        "data": {"name": data.train.name},
    }


def _find_rounds_dependency(method: Method) -> str | None:
    """Say why the rounds of a run depend on their number, if they do."""
    if isinstance(method, RunsAsynchronously):
        return "tasks in flight have ended with it"
    if isinstance(method, LimitsRows):
        return "the stages of the method are shares of it"
    kind = method.local.schedule.kind
    return None if kind == "constant" else f"method.local.schedule.kind = {kind} depends on it"


def _return(value: T) -> T:
    return value
