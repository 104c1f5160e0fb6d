import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pliant.params import digest
from pliant.rng import rng_stream
from pliant.storage import atomic, checkpoint
from pliant.storage.checkpoint import (
    CorruptCheckpoint,
    from_bytes,
    load,
    load_newest,
    save,
    to_bytes,
)

TENSORS = {"weight": torch.arange(6.0).reshape(2, 3), "steps": torch.tensor(7)}
STATE = {"round": 3, "position": 120, "names": ["a", "b"]}


def names(folder):
    return sorted(os.listdir(folder))


def damage(path):
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def test_what_is_saved_is_loaded(tmp_path):
    path = save(tmp_path / "new", 3, TENSORS, STATE)
    tensors, state = load(path)
    assert state == STATE
    assert digest(tensors) == digest(TENSORS)
    assert tensors["weight"].dtype == torch.float32
    assert tensors["steps"].shape == ()


shapes = st.lists(st.integers(0, 3), max_size=3)
kinds = st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])


@given(st.dictionaries(st.text(max_size=5).filter("__metadata__".__ne__), st.tuples(shapes, kinds)))
def test_any_names_shapes_and_types_come_back(wanted):
    tensors = {name: torch.ones(shape, dtype=kind) for name, (shape, kind) in wanted.items()}
    found, _ = from_bytes(to_bytes(tensors, None))
    assert digest(found) == digest(tensors)


def test_tied_and_transposed_tensors_are_saved_as_they_look():
    table = torch.arange(6.0).reshape(2, 3)
    found, _ = from_bytes(to_bytes({"a": table, "b": table, "c": table.T, "d": table[1]}, {}))
    assert torch.equal(found["b"], table)
    assert torch.equal(found["c"], table.T)
    assert torch.equal(found["d"], table[1])


def test_the_same_contents_give_the_same_bytes():
    assert to_bytes(TENSORS, STATE) == to_bytes(dict(reversed(TENSORS.items())), STATE)


def test_a_checkpoint_cut_at_any_byte_is_refused():
    raw = to_bytes(TENSORS, STATE)
    for size in range(len(raw)):
        with pytest.raises(CorruptCheckpoint, match="cut: "):
            from_bytes(raw[:size], "cut")


def test_a_checkpoint_with_anything_behind_it_is_refused():
    with pytest.raises(CorruptCheckpoint, match="do not match their SHA-256"):
        from_bytes(to_bytes(TENSORS, STATE) + b"\0")


def test_ten_thousand_flipped_bits_are_all_refused():
    raw = to_bytes(TENSORS, STATE)
    random = rng_stream(0, "flips")
    for place in random.integers(len(raw) * 8, size=10_000).tolist():
        flipped = bytearray(raw)
        flipped[place // 8] ^= 1 << place % 8
        with pytest.raises(CorruptCheckpoint, match="flipped: "):
            from_bytes(bytes(flipped), "flipped")


def test_another_file_is_refused_by_name(tmp_path):
    path = tmp_path / "00000001.ckpt"
    path.write_bytes(b"PK" + b"\0" * 100)
    with pytest.raises(CorruptCheckpoint, match=r"00000001.ckpt: expected a pliant checkpoint"):
        load(path)


def test_two_generations_are_kept(tmp_path):
    for number in range(5):
        save(tmp_path, number, TENSORS, {"round": number})
    assert names(tmp_path) == ["00000003.ckpt", "00000004.ckpt"]
    number, _, state = load_newest(tmp_path)
    assert (number, state) == (4, {"round": 4})


def test_the_older_generation_stands_in_for_a_damaged_one(tmp_path):
    save(tmp_path, 1, TENSORS, {"round": 1})
    damage(save(tmp_path, 2, TENSORS, {"round": 2}))
    number, _, state = load_newest(tmp_path)
    assert (number, state) == (1, {"round": 1})


def test_going_on_from_the_older_one_leaves_the_damaged_future(tmp_path):
    save(tmp_path, 4, TENSORS, {"round": 4})
    damage(save(tmp_path, 8, TENSORS, {"round": 8}))
    save(tmp_path, 6, TENSORS, {"round": 6})
    assert names(tmp_path) == ["00000004.ckpt", "00000006.ckpt"]


def test_two_damaged_generations_are_an_error_that_names_both(tmp_path):
    for number in (1, 2):
        save(tmp_path, number, TENSORS, STATE)
    for path in tmp_path.iterdir():
        damage(path)
    with pytest.raises(CorruptCheckpoint, match=r"no intact .*00000002.ckpt.*00000001.ckpt"):
        load_newest(tmp_path)


def test_no_checkpoint_is_none(tmp_path):
    assert load_newest(tmp_path) is None
    assert load_newest(tmp_path / "nowhere") is None


def test_generations_are_ordered_by_number_not_by_text(tmp_path):
    for number in (99_999_999, 100_000_000):
        save(tmp_path, number, TENSORS, {"round": number})
    assert load_newest(tmp_path)[0] == 100_000_000


def test_a_full_disk_leaves_both_older_generations(tmp_path, monkeypatch):
    for number in (1, 2):
        save(tmp_path, number, TENSORS, STATE)

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, 3, TENSORS, STATE)
    assert names(tmp_path) == ["00000001.ckpt", "00000002.ckpt"]
    assert load_newest(tmp_path)[0] == 2


def test_what_a_kill_left_is_cleared_away(tmp_path):
    (tmp_path / ".00000001.ckpt.0a1b2c3d.tmp").write_bytes(b"half")
    save(tmp_path, 1, TENSORS, STATE)
    assert names(tmp_path) == ["00000001.ckpt"]


def test_only_its_owner_reads_a_private_checkpoint(tmp_path):
    tensors = {"x": torch.zeros(1)}
    for folder, is_private in ((tmp_path / "private", True), (tmp_path / "shared", False)):
        part = checkpoint.write_part(folder, "kept", tensors, is_private=is_private)
        checkpoint.save(folder, 1, tensors, {}, {"kept": part}, is_private=is_private)
        modes = {path.stat().st_mode & 0o077 for path in folder.rglob("*.*")}
        assert (modes == {0}) == is_private
