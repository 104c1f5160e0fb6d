import numpy as np
import pytest

from pliant.data.picture import class_counts, draw_shares

SHARES = (np.array([0, 1, 2]), np.array([3]))
LABELS = np.array([0, 1, 1, 2])


def test_classes_are_counted_for_each_device():
    assert class_counts(SHARES, LABELS, 4).tolist() == [[1, 2, 0, 0], [0, 0, 1, 0]]


@pytest.mark.parametrize(("suffix", "begins"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_the_picture_is_drawn_in_the_format_of_its_name(tmp_path, suffix, begins):
    pytest.importorskip("matplotlib")
    path = draw_shares(tmp_path / f"shares.{suffix}", SHARES, LABELS, 4, title="two devices")
    assert path.read_bytes().startswith(begins)
    assert [file.name for file in tmp_path.iterdir()] == [f"shares.{suffix}"]
