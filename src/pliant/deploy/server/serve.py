"""Serve a run to real devices, in rounds or without them."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from secrets import token_hex

import msgspec

from pliant import runtime
from pliant.data.declared import DeclaredData
from pliant.deploy.messages import (
    TrainRequest,
    encode_for_devices,
    encode_message,
    has_own_data,
)
from pliant.deploy.server.live_tasks import LiveTasks
from pliant.deploy.server.presence import PresenceWriter
from pliant.deploy.server.remote_tasks import RemoteTasks
from pliant.deploy.server.replies import find_max_reply_bytes
from pliant.deploy.server.reply_store import ReplyStore
from pliant.deploy.server.rounds import DeviceTransport, NotEnoughDevices, make_run
from pliant.deploy.settings import BYTE_LIMIT_FILE, SETTINGS_FILE, ServerSettings
from pliant.devices import CostRows
from pliant.engine.async_loop import AsyncDevices
from pliant.engine.ledger import RoundRecord
from pliant.engine.round_loop import Transport, run_rounds
from pliant.engine.run_store import RunStore, read_records
from pliant.engine.worker_context import WorkerContext
from pliant.experiment.build import build_run_context, build_server_context
from pliant.experiment.config import Experiment, load_run_config
from pliant.methods.verbs import RunsAsynchronously
from pliant.storage import atomic

SECRET_SEED_FILE = "privacy.seed"  # who has it knows who was drawn, and the noise


@dataclass(frozen=True)
class PreparedRun:
    """What the server's process needs to run the rounds in a folder."""

    experiment: Experiment
    settings: ServerSettings
    context: WorkerContext
    hello: bytes  # the first message to each device
    max_reply_bytes: int


def prepare_run(folder: Path) -> PreparedRun:
    """Build the run in a folder; write there how large a valid reply can be."""
    experiment = load_run_config(folder)
    settings = msgspec.json.decode((folder / SETTINGS_FILE).read_bytes(), type=ServerSettings)
    is_own = has_own_data(experiment, settings.pace)
    context = (build_server_context if is_own else build_run_context)(experiment)
    max_reply_bytes = find_max_reply_bytes(context, experiment.settings.guard)
    atomic.write_bytes(folder / BYTE_LIMIT_FILE, str(max_reply_bytes).encode())
    config = encode_for_devices(experiment, settings.pace)
    hello = encode_message(TrainRequest("hello", config, -1, pace=settings.pace))
    return PreparedRun(experiment, settings, context, hello, max_reply_bytes)


def serve(context: WorkerContext, devices: DeviceTransport, folder: Path) -> Iterator[RoundRecord]:
    """Run the remaining rounds of the run in a folder and yield their records."""
    store, retries = RunStore(folder), devices.settings.retries
    devices.presence = PresenceWriter(folder, shares=_list_shares(context))
    devices.store = ReplyStore(folder)
    try:
        run = make_run(devices.experiment, context, store, _get_secret_seed(devices, folder))
        is_empty = [r.merged == 0 for r in read_records(folder) if isinstance(r, RoundRecord)]
        run.repeated_rounds = sum(is_empty)
        transport = make_transport(devices)
        if isinstance(context.data, DeclaredData) and transport is devices:
            run.test_on_devices = devices.test_network
        # a run that has given up may retry as often again
        consecutive = len(list(takewhile(bool, reversed(is_empty)))) % (retries + 1)
        for record in run_rounds(run, transport, store):
            runtime.release_freed_memory()  # as much as the round's updates have left behind
            yield record
            consecutive = 0 if record.merged else consecutive + 1
            if consecutive > retries:
                raise NotEnoughDevices(f"no update was merged in {consecutive} consecutive rounds")
    finally:
        store.close()
        devices.presence.note_online(())


def _list_shares(context: WorkerContext) -> tuple[float, ...]:
    """Return the share of the full network's MACs of each row that devices may be given."""
    rows = getattr(context.budget_policy, "rows", None)
    return rows.shares if isinstance(rows, CostRows) else ()


def _get_secret_seed(devices: DeviceTransport, folder: Path) -> int | None:
    """Return the seed of what privacy hides; devices know that of the experiment.

    A rehearsal draws as the simulation does.
    """
    if devices.experiment.privacy is None or devices.settings.pace == "simulated":
        return None
    path = folder / SECRET_SEED_FILE
    if not path.exists():
        atomic.write_bytes(path, token_hex(16).encode(), is_private=True)
    return int(path.read_text(), 16)


def make_transport(devices: DeviceTransport) -> Transport:
    """Return the transport of the experiment's method; only some methods have rounds."""
    method = devices.experiment.federated_method
    if not isinstance(method, RunsAsynchronously):
        return devices
    if devices.settings.pace == "simulated":
        return AsyncDevices(RemoteTasks(devices), method)
    return LiveTasks(devices, method)
