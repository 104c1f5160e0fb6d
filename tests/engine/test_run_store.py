import errno
import os

import pytest
import torch

from pliant.engine import run_store
from pliant.engine.ledger import sum_tasks
from pliant.engine.run_store import RunState, RunStore, load_run_state, read_records
from pliant.methods.base import ServerState


def make_record(number):
    return sum_tasks(number, float(number), [])


def make_state(number=1, seconds=0.1 + 0.2):
    params = {"conv.weight": torch.arange(6.0).reshape(2, 3), "count": torch.tensor(4)}
    extra = {"control": {"a/b": torch.ones(2), "conv.weight": torch.full((2, 3), number / 3)}}
    device_states = {7: {"conv.weight": torch.ones(2, 3)}, 123456: {"c": torch.zeros(1)}}
    return RunState(number, seconds, ServerState(params, extra), device_states)


def is_same(left, right):
    def flatten(run_state):
        server_state = run_state.server_state
        tensors = {("params", name): tensor for name, tensor in server_state.params.items()}
        for key, params in server_state.extra.items():
            tensors |= {(key, name): tensor for name, tensor in params.items()}
        for key, params in run_state.device_states.items():
            tensors |= {(key, name): tensor for name, tensor in params.items()}
        return tensors

    a, b = flatten(left), flatten(right)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)
    return (left.next_round, left.seconds) == (right.next_round, right.seconds)


def count_records(folder):
    return len(list(read_records(folder)))


def test_a_saved_run_is_loaded_completely(tmp_path):
    store = RunStore(tmp_path)
    assert store.resume() is None
    store.append([make_record(0)])
    store.save(make_state())
    store.close()
    assert is_same(load_run_state(tmp_path), make_state())
    store = RunStore(tmp_path)
    assert is_same(store.resume(), make_state())
    store.close()


def test_a_new_folder_has_no_run(tmp_path):
    assert load_run_state(tmp_path / "none") is None


def test_records_after_the_last_checkpoint_are_dropped(tmp_path):
    store = RunStore(tmp_path)
    store.append([make_record(0), make_record(1)])
    store.save(make_state())
    store.append([make_record(2)])
    store.close()
    assert count_records(tmp_path) == 3
    assert is_same(load_run_state(tmp_path), make_state())
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
    assert is_same(load_run_state(tmp_path), make_state(6))


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
    assert is_same(load_run_state(tmp_path), make_state(3))
