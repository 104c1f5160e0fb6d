"""The trade-off figure: Pareto-optimal groups, comparable groups, placement of labels."""

import math

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from tests.analysis.runs_on_disk import write_run

from pliant.analysis.labels import place_labels
from pliant.analysis.runs import (
    FEDERATED,
    SPLIT,
    group_comparable,
    group_runs,
    load_runs,
    select_finished,
)
from pliant.analysis.style import make_figure
from pliant.analysis.tradeoff import compute_tradeoff_points, draw_tradeoff

ADASPLIT = {"type": "adasplit", "cut": "stage1"}


def load_groups(folder):
    return select_finished(group_runs(load_runs([folder])))


@pytest.fixture
def groups(tmp_path):
    """Return three groups whose rounds are two tasks each: 200 MACs, 3,000 bytes."""
    write_run(tmp_path / "method=long,seed=0", [0.2, 0.4], seed=0)
    write_run(tmp_path / "method=long,seed=1", [0.2, 0.8], seed=1)
    write_run(tmp_path / "method=short", [0.5])
    write_run(tmp_path / "method=worse", [0.1, 0.5], guard=1)
    return load_groups(tmp_path)


def test_means_and_spread_over_seeds(groups):
    long, short, _ = compute_tradeoff_points(groups)
    assert long.accuracy == pytest.approx((0.6, math.sqrt(0.08)))
    assert (long.traffic, long.macs, long.seeds) == ((6000, 0), (400, 0), 2)
    assert (short.accuracy, short.traffic, short.macs) == ((0.5, 0), (3000, 0), (200, 0))


def test_a_group_is_optimal_if_no_other_beats_it_in_all_three(groups):
    points = compute_tradeoff_points(groups)
    assert [(point.label, point.is_pareto_optimal) for point in points] == [
        ("long", True),  # most accurate
        ("short", True),  # cheapest
        ("worse", False),  # as accurate as short, at twice the cost
    ]


def test_the_figure_has_numbers_and_a_text_alternative(groups):
    figure = draw_tradeoff("", groups)
    assert figure.slug == "trade-off"
    assert figure.rows[1] == ("short", 0.5, 0.0, 3e-6, 0.0, 2e-7, 1, "yes")
    assert "at least as good in each): long, short." in figure.alt_text
    assert "worse: 50.00 % for 6 kB and 400 MACs" in figure.alt_text


def test_a_single_group_has_no_trade_off(tmp_path):
    write_run(tmp_path / "only", [0.5])
    assert draw_tradeoff("", load_groups(tmp_path)) is None


def write_pair(folder, *, data):
    write_run(folder / "method=fedavg", [0.4, 0.5], data={"name": "digits"})
    write_run(folder / "method=adasplit", [0.3, 0.6], method=ADASPLIT, data={"name": data})
    return group_comparable(load_groups(folder))


def test_federated_and_split_methods_with_the_same_data_are_compared(tmp_path):
    ((name, groups),) = write_pair(tmp_path, data="digits").items()
    assert name == ""
    assert [group.label for group in groups] == ["adasplit", "fedavg"]


def test_federated_and_split_methods_with_different_data_are_separated(tmp_path):
    by_kind = write_pair(tmp_path, data="mnist")
    labels = {kind: [(group.index, group.label) for group in by_kind[kind]] for kind in by_kind}
    assert labels == {SPLIT: [(0, "adasplit")], FEDERATED: [(1, "fedavg")]}


def get_label_boxes(axes):
    renderer = FigureCanvasAgg(axes.figure).get_renderer()
    labels = [text for text in axes.texts if text.get_text()]
    return [label.get_window_extent(renderer) for label in labels]


@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_seventeen_labels_do_not_overlap_and_stay_inside_the_axes(spread):
    _, axes = make_figure(5.0)
    rng = np.random.default_rng(3)
    centres = rng.uniform(0.45, 0.55, (17, 2)) * [1, 1 + spread]
    axes.scatter(centres[:, 0], centres[:, 1])
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.5)
    points = [(x, y, 8.0) for x, y in centres]
    place_labels(axes, points, [(f"kappa 0.{index}", "normal") for index in range(17)])
    boxes = get_label_boxes(axes)
    assert len(boxes) == 17
    frame = axes.get_window_extent()
    for index, box in enumerate(boxes):
        assert frame.x0 <= box.x0 < box.x1 <= frame.x1
        assert frame.y0 <= box.y0 < box.y1 <= frame.y1
        assert not any(box.overlaps(other) for other in boxes[index + 1 :])
