import errno
import os
from dataclasses import dataclass, fields, replace

import pytest
import torch
from torch import Tensor

from pliant.engine import run_store
from pliant.engine.ledger import sum_tasks
from pliant.engine.run_store import RunState, RunStore, load_run_state, read_records
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
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
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
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["00000003.ckpt"]
    assert is_same(load_run_state(tmp_path, ScaffoldState, DeviceMemory), make_state(3))
