import json
import re

import pytest

from pliant.data import femnist


def make_samples(*labels, value=0.0):
    return {"x": [[value] * 784 for _ in labels], "y": list(labels)}


def write_part(root, part="train", samples_by_user=None, **changes):
    data = samples_by_user or {
        "f0001_41": make_samples(0, 61),
        "f0002_10": make_samples(5, value=1.0),
    }
    file = {
        "users": list(data),
        "num_samples": [len(samples["y"]) for samples in data.values()],
        "user_data": data,
    }
    path = root / "femnist" / part / "all_data_0_niid_0_keep_0_train_9.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(file | changes))
    return path


def test_groups_are_users_and_agree_in_both_parts(tmp_path):
    write_part(tmp_path)
    write_part(tmp_path, "test", {"f0002_10": make_samples(7), "f0003_99": make_samples(8)})
    source = femnist(tmp_path)
    assert source.train.labels.tolist() == [0, 61, 5]
    assert source.train.groups.tolist() == [0, 0, 1]
    assert source.test.groups.tolist() == [1, 2]
    assert source.train.pixels[:, 0, 0, 0].tolist() == [0, 0, 255]
    assert source.train.shape == (1, 28, 28)
    assert source.train.classes == 62
    assert source.test.mean == source.train.mean


def test_the_folders_may_be_in_the_root(tmp_path):
    write_part(tmp_path)
    write_part(tmp_path, "test")
    assert len(femnist(tmp_path / "femnist").train) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"user_data": {"f0001_41": make_samples(0, 61)}},
            "expected user_data of user f0002_10, got none",
        ),
        ({"num_samples": [2, 2]}, "expected 2 samples of user f0002_10, got 1 images and 1 labels"),
        ({"num_samples": [2]}, "expected 2 num_samples, got 1"),
        ({"users": [], "num_samples": []}, "expected at least one user, got none"),
        (
            {"user_data": {"f0001_41": make_samples(0, 62), "f0002_10": make_samples(1)}},
            "user f0001_41: expected labels from 0 to 61, got 62",
        ),
        (
            {"user_data": {"f0001_41": make_samples(0, 1), "f0002_10": make_samples(1, value=2.0)}},
            "user f0002_10: expected pixels from 0 to 1, got 2.0 to 2.0",
        ),
        (
            {"user_data": {"f0001_41": make_samples(0, 1), "f0002_10": {"x": [[0.0]], "y": [1]}}},
            "user f0002_10: expected images of 784 numbers, got 1",
        ),
    ],
)
def test_a_wrong_file_is_rejected_by_name(tmp_path, changes, message):
    path = write_part(tmp_path, **changes)
    write_part(tmp_path, "test")
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}: .*{re.escape(message)}"):
        femnist(tmp_path)


def test_a_truncated_file_is_rejected(tmp_path):
    path = write_part(tmp_path)
    write_part(tmp_path, "test")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(
        ValueError, match=r"train_9.json: expected LEAF's JSON, got Input data was trunc"
    ):
        femnist(tmp_path)


def test_the_error_for_a_missing_set_tells_how_to_make_it(tmp_path):
    with pytest.raises(FileNotFoundError, match="make it with LEAF"):
        femnist(tmp_path)
