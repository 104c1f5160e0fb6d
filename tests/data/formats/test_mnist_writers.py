import numpy as np
import pytest
import torch

from pliant.data.formats.mnist_writers import read_writers

TRAIN, TEST = torch.tensor([5, 0, 4]), torch.tensor([7, 2])


def encode_table(rows):
    """Return an idx file of four-byte integers, like those of QMNIST."""
    items = np.array(rows, ">i4")
    return bytes([0, 0, 0x0C, 2]) + np.array(items.shape, ">u4").tobytes() + items.tobytes()


def test_without_a_file_no_writers_are_known(tmp_path):
    assert read_writers(tmp_path, TRAIN, TEST) == (None, None)


def test_writers_come_from_named_arrays(tmp_path):
    np.savez(
        tmp_path / "writer_ids.npz",
        train_writer=np.uint16([9, 9, 3]),
        test_writer=np.uint16([1, 2]),
    )
    train, test = read_writers(tmp_path, TRAIN, TEST)
    assert train.tolist() == [9, 9, 3]
    assert test.tolist() == [1, 2]


def test_writers_come_from_the_tables_of_qmnist(tmp_path):
    folder = tmp_path / "mnist"
    folder.mkdir()
    (folder / "qmnist-train-labels-idx2-int").write_bytes(
        encode_table([[5, 4, 21], [0, 4, 22], [4, 4, 21]])
    )
    (folder / "qmnist-test-labels-idx2-int").write_bytes(
        encode_table([[7, 4, 1], [2, 4, 2], [9, 4, 3]])
    )
    train, test = read_writers(tmp_path, TRAIN, TEST)
    assert train.tolist() == [21, 22, 21]
    assert test.tolist() == [1, 2]


def test_a_table_of_other_digits_is_rejected(tmp_path):
    path = tmp_path / "qmnist-train-labels-idx2-int"
    path.write_bytes(encode_table([[5, 4, 21], [1, 4, 22], [4, 4, 21]]))
    with pytest.raises(ValueError, match="idx2-int: expected the labels of MNIST in column 0"):
        read_writers(tmp_path, TRAIN, TEST)
    path.write_bytes(encode_table([[5, 4, 21]]))
    with pytest.raises(ValueError, match="idx2-int: expected a table of at least 3 rows"):
        read_writers(tmp_path, TRAIN, TEST)


def test_damaged_or_pickled_arrays_are_rejected(tmp_path):
    path = tmp_path / "writer_ids.npz"
    np.savez(path, train_writer=np.array([{}, {}, {}]), test_writer=np.uint16([1, 2]))
    with pytest.raises(ValueError, match=r"writer_ids.npz: expected arrays of writers: .*pickle"):
        read_writers(tmp_path, TRAIN, TEST)
    np.savez(path, train_writer=np.uint16([1, 2]), test_writer=np.uint16([1, 2]))
    with pytest.raises(ValueError, match="3 integers as train_writer"):
        read_writers(tmp_path, TRAIN, TEST)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"writer_ids.npz: expected arrays of writers"):
        read_writers(tmp_path, TRAIN, TEST)
