import gzip
import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pliant.data.formats.idx import encode_idx, pair_images_with_labels, parse_idx, read_idx

ITEMS = torch.arange(24, dtype=torch.uint8).view(2, 3, 4)
RAW = bytes([0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 4]) + bytes(range(24))


def test_plain_and_gzipped_bytes_are_read(tmp_path):
    (tmp_path / "plain").write_bytes(RAW)
    (tmp_path / "packed.gz").write_bytes(gzip.compress(RAW))
    assert torch.equal(read_idx(tmp_path / "plain"), ITEMS)
    assert torch.equal(read_idx(tmp_path / "packed.gz"), ITEMS)


def test_four_byte_integers_are_big_endian():
    raw = bytes([0, 0, 0x0C, 1, 0, 0, 0, 2, 0, 0, 1, 0, 255, 255, 255, 255])
    assert parse_idx(raw, "table").tolist() == [256, -1]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4))
def test_encoding_and_parsing_are_inverse(shape):
    items = torch.from_numpy(np.random.default_rng(0).integers(0, 256, shape, np.uint8))
    assert torch.equal(parse_idx(encode_idx(items), "memory"), items)


@pytest.mark.parametrize("length", range(len(RAW)))
def test_a_file_truncated_at_any_byte_is_rejected(length):
    with pytest.raises(ValueError, match=r"^here: expected"):
        parse_idx(RAW[:length], "here")


def test_a_gzip_file_truncated_at_any_byte_is_rejected(tmp_path):
    packed = gzip.compress(RAW)
    path = tmp_path / "cut.gz"
    for length in range(len(packed)):
        path.write_bytes(packed[:length])
        with pytest.raises(ValueError, match=r"cut.gz: expected"):
            read_idx(path)


def test_a_flipped_bit_in_a_gzip_file_never_changes_the_items(tmp_path):
    packed = gzip.compress(RAW, mtime=0)
    path = tmp_path / "flipped.gz"
    rejections = 0
    for bit in range(8 * len(packed)):
        changed = bytearray(packed)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        try:
            items = read_idx(path)
        except ValueError:
            rejections += 1
        else:
            assert torch.equal(items, ITEMS)  # a header bit that is never read
    assert rejections > 4 * len(packed)


def test_a_wrong_magic_number_is_reported():
    with pytest.raises(ValueError, match=r"set: expected an idx magic number .*, got 89 50 4e 47"):
        parse_idx(b"\x89PNG" + bytes(20), "set")


def test_a_file_that_is_too_long_is_rejected():
    with pytest.raises(ValueError, match="expected 40 bytes for shape \\(2, 3, 4\\), got 41"):
        parse_idx(RAW + b"x", "set")


def test_a_changed_byte_in_a_plain_file_is_detected_by_its_digest(tmp_path):
    path = tmp_path / "plain"
    digest = hashlib.sha256(RAW).hexdigest()
    path.write_bytes(RAW)
    assert torch.equal(read_idx(path, expected_digest=digest), ITEMS)
    path.write_bytes(RAW[:-1] + b"x")
    with pytest.raises(ValueError, match=f"plain: expected SHA-256 {digest}"):
        read_idx(path, expected_digest=digest)


def test_images_and_labels_must_have_the_same_length():
    with pytest.raises(ValueError, match="set: expected 2 labels, one per image, got \\(3,\\)"):
        pair_images_with_labels(ITEMS, torch.zeros(3, dtype=torch.uint8), "set")
    images, labels = pair_images_with_labels(ITEMS, torch.tensor([3, 4], dtype=torch.uint8), "set")
    assert images.shape == (2, 1, 3, 4)
    assert labels.dtype == torch.int64
