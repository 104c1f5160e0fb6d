import errno
import os
from dataclasses import dataclass, fields, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pliant.engine import run_store
from pliant.engine.ledger import sum_tasks
from pliant.engine.run_store import (
    RunState,
    RunStore,
    load_run_state,
    load_trained_params,
    read_records,
)
from pliant.methods.aggregation import CoverageState
from pliant.methods.base import ServerState
from pliant.methods.elfish import ElfishState
from pliant.methods.scaffold import ScaffoldState
from pliant.params import Params
from pliant.storage import checkpoint


@dataclass(frozen=True)
class EveryKind:
    """A server state with a field of every kind."""

    params: Params
    groups: dict[str, Params]
    seen: Tensor
    by_device: dict[int, Params]
    sums: dict[int, Tensor]
    count: int
    best: float


@dataclass(frozen=True)
class DeviceMemory:
    variate: Params


PARAMS = {"conv.weight": torch.arange(6.0).reshape(2, 3), "count": torch.tensor(4)}
THIRDS = {"a/b": torch.ones(2), "conv.weight": torch.full((2, 3), 1 / 3)}
WIDE = {"conv.weight": torch.full((2, 3), 0.1, dtype=torch.float64)}
STATES = [
    ServerState(PARAMS),
    EveryKind(
        PARAMS,
        {"0": THIRDS, "params": WIDE, "1": PARAMS},
        torch.tensor([7, 2**40]),
        {7: THIRDS, 12: PARAMS},
        {-3: torch.ones(2)},
        2**62,
        0.1,
    ),
    EveryKind(PARAMS, {}, torch.tensor(1.5), {}, {}, -1, float("inf")),
    ScaffoldState(PARAMS),
    ScaffoldState(PARAMS, THIRDS, WIDE, torch.tensor([3, 5])),
    ElfishState(PARAMS, {"0": torch.tensor([0.1, 0.7])}),
    CoverageState(PARAMS, {"0": torch.tensor([True, False]), "11": torch.tensor([True])}),
    ServerState(PARAMS, momentum=THIRDS, square=WIDE),
]


def make_record(number):
    return sum_tasks(number, float(number), [])


def make_state(number=1, seconds=0.1 + 0.2):
    control = {"a/b": torch.ones(2), "conv.weight": torch.full((2, 3), number / 3)}
    return make_run_state(ScaffoldState(PARAMS, control), number, seconds)


def make_run_state(server_state, number=1, seconds=0.1 + 0.2):
    device_states = {
        7: DeviceMemory({"conv.weight": torch.ones(2, 3)}),
        123456: DeviceMemory({"c": torch.zeros(1)}),
    }
    return RunState(number, seconds, server_state, device_states)


def are_equal(left, right):
    """Compare trees of dictionaries and tensors, types included."""
    if type(left) is not type(right):
        return False
    if isinstance(left, Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, int | float):
        return left == right
    if isinstance(left, DeviceMemory):
        return are_equal(left.variate, right.variate)
    return left.keys() == right.keys() and all(are_equal(left[key], right[key]) for key in left)


def is_same(left, right):
    a, b = left.server_state, right.server_state
    assert type(a) is type(b)
    for field in fields(b):
        assert are_equal(getattr(a, field.name), getattr(b, field.name)), field.name
    assert are_equal(left.device_states, right.device_states)
    return (left.next_round, left.seconds) == (right.next_round, right.seconds)


def count_records(folder):
    return len(list(read_records(folder)))


def test_a_saved_run_is_loaded_completely(tmp_path):
    store = RunStore(tmp_path)
    assert store.resume() is None
    store.append([make_record(0)])
    store.save(make_state())
    store.close()
    assert is_same(load_run_state(tmp_path, ScaffoldState, DeviceMemory), make_state())
    store = RunStore(tmp_path)
    assert is_same(store.resume(ScaffoldState, DeviceMemory), make_state())
    store.close()


@pytest.mark.parametrize("state", STATES, ids=lambda state: type(state).__name__)
def test_every_kind_of_server_state_is_resumed_exactly(state, tmp_path):
    run_state = make_run_state(state)
    store = RunStore(tmp_path)
    store.save(run_state)
    assert is_same(store.resume(type(state), DeviceMemory), run_state)
    store.close()
    assert is_same(load_run_state(tmp_path, type(state), DeviceMemory), run_state)
    plain = state if isinstance(state, ServerState) else ServerState(state.params)
    without_devices = replace(run_state, server_state=plain, device_states={})
    assert is_same(load_run_state(tmp_path), without_devices)


def test_a_tensor_is_stored_under_its_field_or_its_device(tmp_path):
    store = RunStore(tmp_path)
    store.save(make_run_state(STATES[1]))
    store.close()
    _, tensors, _ = checkpoint.load_newest(tmp_path / "checkpoints")
    inner = ["0/a/b", "0/conv.weight", "params/conv.weight", "1/conv.weight", "1/count"]
    assert tensors.keys() == {
        "server/params/conv.weight",
        "server/params/count",
        *(f"server/groups/{name}" for name in inner),
        "server/seen",
        *(f"server/by_device/7/{name}" for name in THIRDS),
        *(f"server/by_device/12/{name}" for name in PARAMS),
        "server/sums/-3",
        "server/count",
        "server/best",
        "devices/7/conv.weight",
        "devices/123456/c",
    }


def test_a_new_folder_has_no_run(tmp_path):
    assert load_run_state(tmp_path / "none") is None


def test_records_after_the_last_checkpoint_are_dropped(tmp_path):
    store = RunStore(tmp_path)
    store.append([make_record(0), make_record(1)])
    store.save(make_state())
    store.append([make_record(2)])
    store.close()
    assert count_records(tmp_path) == 3
    assert is_same(load_run_state(tmp_path, ScaffoldState, DeviceMemory), make_state())
    assert count_records(tmp_path) == 3  # loading changes nothing
    store = RunStore(tmp_path)
    store.resume()
    assert count_records(tmp_path) == 2
    store.append([make_record(2)])
    store.close()
    assert count_records(tmp_path) == 3


def test_records_without_a_checkpoint_are_dropped(tmp_path):
    store = RunStore(tmp_path)
    store.append([make_record(0)])
    store.close()
    store = RunStore(tmp_path)
    assert store.resume() is None
    store.close()
    assert count_records(tmp_path) == 0


def test_the_two_newest_checkpoints_are_kept(tmp_path):
    store = RunStore(tmp_path)
    for number in (3, 6, 9):
        store.save(make_state(number))
    store.close()
    names = sorted(path.name for path in (tmp_path / "checkpoints").glob("*.ckpt"))
    assert names == ["00000006.ckpt", "00000009.ckpt"]
    (tmp_path / "checkpoints/00000009.ckpt").write_bytes(b"truncated")
    assert is_same(load_run_state(tmp_path, ScaffoldState, DeviceMemory), make_state(6))


def test_a_write_error_names_the_file(tmp_path, monkeypatch):
    store = RunStore(tmp_path)
    store.save(make_state(3))

    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(run_store.checkpoint.atomic.os, "fsync", fail)
    for write, name in [
        (lambda: store.save(make_state(6)), "events.jsonl"),
        (lambda: run_store.checkpoint.save(tmp_path / "checkpoints", 6, {}, {}), ""),
    ]:
        with pytest.raises(OSError, match=f"No space left on device.*{name}"):
            write()
    monkeypatch.undo()
    store.close()
    assert [path.name for path in (tmp_path / "checkpoints").glob("*.ckpt")] == ["00000003.ckpt"]
    assert is_same(load_run_state(tmp_path, ScaffoldState, DeviceMemory), make_state(3))


def list_parts(folder):
    return {path.name: path.stat().st_ino for path in (folder / "checkpoints/parts").iterdir()}


def test_only_states_that_changed_are_written_again(tmp_path):
    store = RunStore(tmp_path)
    state = make_state(3)
    store.save(state)
    first = list_parts(tmp_path)
    assert [name.rpartition("-")[0] for name in sorted(first)] == ["devices-123456", "devices-7"]
    changed = DeviceMemory({"conv.weight": torch.zeros(2, 3)})
    state = replace(state, next_round=6, device_states={**state.device_states, 7: changed})
    store.save(state)
    second = list_parts(tmp_path)
    assert first.items() < second.items()  # the same files, not rewritten
    assert len(second) == 3
    assert is_same(load_run_state(tmp_path, ScaffoldState, DeviceMemory), state)
    store.save(replace(state, next_round=9))
    assert len(list_parts(tmp_path)) == 2  # no generation needs the oldest state of device 7
    store.close()
    store = RunStore(tmp_path)
    store.save(replace(store.resume(ScaffoldState, DeviceMemory), next_round=12))
    assert list_parts(tmp_path).items() <= second.items()  # nor are they after a resume
    store.close()


def test_checkpoints_do_not_grow_with_what_devices_keep(tmp_path):
    def save(name, size):
        store = RunStore(tmp_path / name)
        states = {7: DeviceMemory({"c": torch.zeros(size)})}
        residuals = {7: {"c": torch.zeros(size)}}
        store.save(replace(make_state(), device_states=states, residuals=residuals))
        store.close()
        return (tmp_path / name / "checkpoints/00000001.ckpt").stat().st_size

    assert save("small", 1) == save("large", 10_000)
    saved = load_run_state(tmp_path / "large", ScaffoldState, DeviceMemory)
    assert saved.residuals[7]["c"].shape == saved.device_states[7].variate["c"].shape == (10_000,)


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"truncated")])
def test_the_older_checkpoint_stands_in_for_one_with_a_damaged_part(damage, tmp_path):
    store = RunStore(tmp_path)
    store.save(make_state(3))
    before = list_parts(tmp_path)
    changed = {7: DeviceMemory({"c": torch.ones(1)})}
    store.save(replace(make_state(6), device_states=changed))
    store.close()
    [new] = list_parts(tmp_path).keys() - before.keys()
    damage(tmp_path / "checkpoints/parts" / new)
    assert is_same(load_run_state(tmp_path, ScaffoldState, DeviceMemory), make_state(3))
    params = load_trained_params(tmp_path)
    assert params.keys() == PARAMS.keys()  # which needs no part


def test_a_part_with_the_contents_of_another_is_refused(tmp_path):
    store = RunStore(tmp_path)
    store.save(make_state(3))
    store.close()
    first, second = (tmp_path / "checkpoints/parts").iterdir()
    first.write_bytes(second.read_bytes())
    with pytest.raises(checkpoint.CorruptCheckpoint, match="expected contents as in its name"):
        load_run_state(tmp_path, ScaffoldState, DeviceMemory)


def test_parts_that_a_killed_process_left_are_deleted(tmp_path):
    store = RunStore(tmp_path)
    store.save(make_state(3))
    before = list_parts(tmp_path)
    checkpoint.write_part(tmp_path / "checkpoints", "devices-8", THIRDS)
    (tmp_path / "checkpoints/parts/.devices-9.part.0a1b2c3d.tmp").write_bytes(b"half")
    store.save(make_state(6))
    store.close()
    assert list_parts(tmp_path) == before
