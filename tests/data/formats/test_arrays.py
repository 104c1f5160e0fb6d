"""NPZ, CSV and Parquet files hold the same arrays."""

import duckdb
import numpy as np
import pytest

from pliant.data.formats.arrays import read_arrays

IMAGES = np.array([[0, 255, 7, 3], [1, 2, 3, 4]])
LABELS = np.array([2, 0])


def write_csv(path, images=IMAGES, labels=LABELS):
    rows = [
        f"{','.join(map(str, image))},{label}" for image, label in zip(images, labels, strict=True)
    ]
    path.write_text("\n".join(["a,b,c,d,label", *rows]) + "\n")


def write_npz(path, **arrays):
    np.savez(path, **({"images": IMAGES, "labels": LABELS} | arrays))


def write_columns(path):
    duckdb.execute(
        "COPY (SELECT * FROM (VALUES (0, 255, 7, 3, 2), (1, 2, 3, 4, 0)) t(a, b, c, d, label)) "
        f"TO '{path}' (FORMAT parquet)"
    )


def write_lists(path):
    duckdb.execute(
        "COPY (SELECT * FROM (VALUES (2, [0, 255, 7, 3]), (0, [1, 2, 3, 4])) t(label, image)) "
        f"TO '{path}' (FORMAT parquet)"
    )


@pytest.mark.parametrize(
    ("name", "write"),
    [("a.csv", write_csv), ("a.npz", write_npz), ("a.parquet", write_columns),
     ("a.parquet", write_lists)],
)  # fmt: skip
def test_whole_numbers_are_bytes(tmp_path, name, write):
    write(tmp_path / name)
    images, labels = read_arrays(tmp_path / name)
    assert (images.dtype, labels.dtype) == (np.uint8, np.int64)
    assert images.tolist() == IMAGES.tolist()
    assert labels.tolist() == [2, 0]


def test_other_numbers_are_floats(tmp_path):
    write_csv(tmp_path / "a.csv", IMAGES / 2)
    write_npz(tmp_path / "a.npz", images=IMAGES / 2)
    for name in ("a.csv", "a.npz"):
        images, _ = read_arrays(tmp_path / name)
        assert images.dtype == np.float32
        assert images.tolist() == (IMAGES / 2).tolist()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "a header with 'label'"),
        ("", "a header with 'label'"),
        ("a,label\n1,2,3\n", "line 2: expected 2 values, got 3"),
        ("a,label\nx,2\n", "numbers only"),
        ("a,label\n1,0.5\n", "numbers only"),
        ("a,label\n256,1\n", "from 0 to 255"),
        ("a,label\n-1,1\n", "from 0 to 255"),
        ("a,label\nnan,1\n", "finite numbers"),
    ],
)
def test_a_bad_csv_file_is_refused_in_one_line(tmp_path, text, message):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        read_arrays(tmp_path / "a.csv")
    assert "a.csv" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"labels": LABELS[:1]}, "expected 2 labels"),
        ({"labels": LABELS / 2}, "whole numbers as labels"),
        ({"images": np.array(["a", "b"])}, "expected numbers"),
    ],
)
def test_bad_arrays_are_refused(tmp_path, arrays, message):
    write_npz(tmp_path / "a.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        read_arrays(tmp_path / "a.npz")


@pytest.mark.parametrize("name", ["a.npz", "a.parquet"])
def test_noise_is_refused(tmp_path, name):
    (tmp_path / name).write_bytes(b"noise")
    with pytest.raises(ValueError, match=f"{name}: expected"):
        read_arrays(tmp_path / name)


def test_missing_values_are_refused(tmp_path):
    path = tmp_path / "a.parquet"
    duckdb.execute(
        f"COPY (SELECT * FROM (VALUES (1, 2), (NULL, 0)) t(a, label)) TO '{path}' (FORMAT parquet)"
    )
    with pytest.raises(ValueError, match="no missing values"):
        read_arrays(path)


def test_pickled_objects_are_not_loaded(tmp_path):
    objects = np.array([{}, {}], dtype=object)
    np.savez(tmp_path / "a.npz", images=objects, labels=LABELS)
    with pytest.raises(ValueError, match="allow_pickle"):
        read_arrays(tmp_path / "a.npz")
