import hashlib

import numpy as np
import pytest

from pliant.data.cifar import read_cifar


def write(path, labels, value):
    records = [bytes(label) + bytes([value + n]) * 1024 * 3 for n, label in enumerate(labels)]
    path.write_bytes(b"".join(records))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_records_are_read_in_the_order_of_the_files(tmp_path):
    one, two = tmp_path / "one.bin", tmp_path / "two.bin"
    pins = [write(one, [(3,), (9,)], 10), write(two, [(0,), (1,)], 20)]
    pixels, labels = read_cifar([one, two], classes=10, label_bytes=1, records=2, pins=pins)
    assert labels.tolist() == [3, 9, 0, 1]
    assert pixels.shape == (4, 3, 32, 32)
    assert pixels[:, 0, 0, 0].tolist() == [10, 11, 20, 21]


def test_channels_come_one_after_the_other_row_by_row(tmp_path):
    path = tmp_path / "one.bin"
    image = np.arange(3072) % 251
    path.write_bytes(b"\x00" + image.astype(np.uint8).tobytes())
    pixels, _ = read_cifar([path], classes=10, label_bytes=1, records=1)
    assert pixels[0, 2, 5, 7].item() == (2 * 1024 + 5 * 32 + 7) % 251


def test_the_fine_label_of_two_counts(tmp_path):
    write(tmp_path / "train.bin", [(4, 99), (1, 0)], 0)
    _, labels = read_cifar([tmp_path / "train.bin"], classes=100, label_bytes=2, records=2)
    assert labels.tolist() == [99, 0]


def test_a_cut_file_is_refused(tmp_path):
    path = tmp_path / "one.bin"
    write(path, [(3,), (9,)], 10)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"one.bin: expected 6146 bytes, got 6145"):
        read_cifar([path], classes=10, label_bytes=1, records=2)


def test_a_flipped_bit_is_found_by_the_pin(tmp_path):
    path = tmp_path / "one.bin"
    pin = write(path, [(3,), (9,)], 10)
    raw = bytearray(path.read_bytes())
    raw[4000] ^= 4
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=f"one.bin: expected contents of SHA-256 {pin}, got"):
        read_cifar([path], classes=10, label_bytes=1, records=2, pins=[pin])


def test_a_label_out_of_range_is_refused(tmp_path):
    write(tmp_path / "one.bin", [(3,), (10,)], 10)
    with pytest.raises(ValueError, match=r"one.bin: expected labels from 0 to 9, got 10 at 1"):
        read_cifar([tmp_path / "one.bin"], classes=10, label_bytes=1, records=2)
