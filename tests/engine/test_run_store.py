import errno
import os

import pytest
import torch

from pliant.engine import store as stores
from pliant.engine.ledger import summed
from pliant.engine.store import Saved, Store, newest
from pliant.methods.base import State


def record(number):
    return summed(number, float(number), [])


def saved(number=1, seconds=0.1 + 0.2):
    params = {"conv.weight": torch.arange(6.0).reshape(2, 3), "count": torch.tensor(4)}
    extra = {"control": {"a/b": torch.ones(2), "conv.weight": torch.full((2, 3), number / 3)}}
    memory = {7: {"conv.weight": torch.ones(2, 3)}, 123456: {"c": torch.zeros(1)}}
    return Saved(number, seconds, State(params, extra), memory)


def same(left, right):
    def flat(saved):
        tensors = {("params", name): tensor for name, tensor in saved.state.params.items()}
        for key, params in saved.state.extra.items():
            tensors |= {(key, name): tensor for name, tensor in params.items()}
        for key, params in saved.memory.items():
            tensors |= {(key, name): tensor for name, tensor in params.items()}
        return tensors

    a, b = flat(left), flat(right)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)
    return (left.round, left.seconds) == (right.round, right.seconds)


def lines(folder):
    return (folder / "events.jsonl").read_bytes().count(b"\n")


def test_all_of_a_run_comes_back(tmp_path):
    store = Store(tmp_path)
    assert store.resume() is None
    store.append([record(0)])
    store.save(saved())
    store.close()
    assert same(newest(tmp_path), saved())
    store = Store(tmp_path)
    assert same(store.resume(), saved())
    store.close()


def test_a_new_folder_has_nothing(tmp_path):
    assert newest(tmp_path / "none") is None


def test_records_behind_the_last_checkpoint_are_forgotten(tmp_path):
    store = Store(tmp_path)
    store.append([record(0), record(1)])
    store.save(saved())
    store.append([record(2)])
    store.close()
    assert lines(tmp_path) == 3
    assert same(newest(tmp_path), saved())
    assert lines(tmp_path) == 3  # looking changes nothing
    store = Store(tmp_path)
    store.resume()
    assert lines(tmp_path) == 2
    store.append([record(2)])
    store.close()
    assert lines(tmp_path) == 3


def test_records_without_any_checkpoint_are_forgotten(tmp_path):
    store = Store(tmp_path)
    store.append([record(0)])
    store.close()
    store = Store(tmp_path)
    assert store.resume() is None
    store.close()
    assert lines(tmp_path) == 0


def test_two_generations_are_kept(tmp_path):
    store = Store(tmp_path)
    for number in (3, 6, 9):
        store.save(saved(number))
    store.close()
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["00000006.ckpt", "00000009.ckpt"]
    (tmp_path / "checkpoints/00000009.ckpt").write_bytes(b"cut")
    assert same(newest(tmp_path), saved(6))


def test_an_error_of_writing_says_where(tmp_path, monkeypatch):
    store = Store(tmp_path)
    store.save(saved(3))

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(stores.checkpoint.atomic.os, "fsync", full)
    for write, name in [
        (lambda: store.save(saved(6)), "events.jsonl"),
        (lambda: stores.checkpoint.save(tmp_path / "checkpoints", 6, {}, {}), ""),
    ]:
        with pytest.raises(OSError, match=f"No space left on device.*{name}"):
            write()
    monkeypatch.undo()
    store.close()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["00000003.ckpt"]
    assert same(newest(tmp_path), saved(3))
