import hashlib

import numpy as np
import pytest

from pliant.data.formats.cifar import read_cifar


def write_records(path, labels, value):
    records = [bytes(label) + bytes([value + n]) * 1024 * 3 for n, label in enumerate(labels)]
    path.write_bytes(b"".join(records))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_records_are_read_in_the_order_of_the_files(tmp_path):
    first, second = tmp_path / "one.bin", tmp_path / "two.bin"
    digests = [write_records(first, [(3,), (9,)], 10), write_records(second, [(0,), (1,)], 20)]
    pixels, labels = read_cifar(
        [first, second], classes=10, label_bytes=1, records_per_file=2, expected_digests=digests
    )
    assert labels.tolist() == [3, 9, 0, 1]
    assert pixels.shape == (4, 3, 32, 32)
    assert pixels[:, 0, 0, 0].tolist() == [10, 11, 20, 21]


def test_channels_are_consecutive_and_row_by_row(tmp_path):
    path = tmp_path / "one.bin"
    image = np.arange(3072) % 251
    path.write_bytes(b"\x00" + image.astype(np.uint8).tobytes())
    pixels, _ = read_cifar([path], classes=10, label_bytes=1, records_per_file=1)
    assert pixels[0, 2, 5, 7].item() == (2 * 1024 + 5 * 32 + 7) % 251


def test_the_fine_label_is_used(tmp_path):
    write_records(tmp_path / "train.bin", [(4, 99), (1, 0)], 0)
    _, labels = read_cifar([tmp_path / "train.bin"], classes=100, label_bytes=2, records_per_file=2)
    assert labels.tolist() == [99, 0]


def test_a_truncated_file_is_rejected(tmp_path):
    path = tmp_path / "one.bin"
    write_records(path, [(3,), (9,)], 10)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"one.bin: expected 6146 bytes, got 6145"):
        read_cifar([path], classes=10, label_bytes=1, records_per_file=2)


def test_a_flipped_bit_is_detected_by_the_digest(tmp_path):
    path = tmp_path / "one.bin"
    digest = write_records(path, [(3,), (9,)], 10)
    raw = bytearray(path.read_bytes())
    raw[4000] ^= 4
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=f"one.bin: expected SHA-256 {digest}, got"):
        read_cifar([path], classes=10, label_bytes=1, records_per_file=2, expected_digests=[digest])


def test_a_label_out_of_range_is_rejected(tmp_path):
    write_records(tmp_path / "one.bin", [(3,), (10,)], 10)
    with pytest.raises(ValueError, match=r"one.bin: expected labels from 0 to 9, got 10 at 1"):
        read_cifar([tmp_path / "one.bin"], classes=10, label_bytes=1, records_per_file=2)
