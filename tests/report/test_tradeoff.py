"""The trade-off figure: who is among the best, who is compared with whom, where names stand."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from pymoo.util.nds.non_dominated_sorting import find_non_dominated
from runs_on_disk import write_run

from pliant.report.history import Lake, load_samples
from pliant.report.kinds import FEDERATED, SPLIT, shared
from pliant.report.labels import place_labels
from pliant.report.look import canvas
from pliant.report.runs import grouped, load_runs
from pliant.report.tradeoff import draw_tradeoff, spots, undominated

ADASPLIT = {"type": "adasplit", "cut": "stage1"}


def samples_of(folder):
    lake = Lake()
    try:
        return load_samples(lake, grouped(load_runs([folder])))
    finally:
        lake.close()


@pytest.fixture
def samples(tmp_path):
    """A round is two tasks: 200 MACs, 3,000 bytes."""
    write_run(tmp_path / "method=long,seed=0", [0.2, 0.4], seed=0)
    write_run(tmp_path / "method=long,seed=1", [0.2, 0.8], seed=1)
    write_run(tmp_path / "method=short", [0.5])
    write_run(tmp_path / "method=worse", [0.1, 0.5], guard=1)
    return samples_of(tmp_path)


def test_means_and_spread_over_seeds(samples):
    long, short, _ = spots(samples)
    assert long.accuracy == pytest.approx((0.6, math.sqrt(0.08)))
    assert (long.sent, long.macs, long.seeds) == ((6000, 0), (400, 0), 2)
    assert (short.accuracy, short.sent, short.macs) == ((0.5, 0), (3000, 0), (200, 0))


def test_the_best_are_those_that_no_other_beats_in_all_three(samples):
    assert [(spot.label, spot.is_best) for spot in spots(samples)] == [
        ("long", True),  # most accurate
        ("short", True),  # cheapest
        ("worse", False),  # as accurate as short, at twice the cost
    ]


@given(
    st.lists(st.tuples(*[st.integers(0, 3)] * 3), min_size=1, max_size=12).map(
        lambda rows: np.array(rows, float)
    )
)
def test_the_best_are_those_that_pymoo_finds(costs):
    assert np.flatnonzero(undominated(costs)).tolist() == sorted(find_non_dominated(costs))


def test_numbers_and_words_stand_beside_the_picture(samples):
    (share,) = shared(samples)
    drawn = draw_tradeoff(share)
    assert drawn.slug == "trade-off"
    assert drawn.rows[1] == ("short", 0.5, 0.0, 3e-6, 0.0, 2e-7, 1, "yes")
    assert "at least as good in each): long, short." in drawn.told
    assert "worse: 50.00 % for 6 kB and 400 MACs" in drawn.told


def test_one_group_alone_has_no_trade_off(tmp_path):
    write_run(tmp_path / "only", [0.5])
    (share,) = shared(samples_of(tmp_path))
    assert draw_tradeoff(share) is None


def write_pair(folder, *, data):
    write_run(folder / "method=fedavg", [0.4, 0.5], data={"name": "digits"})
    write_run(folder / "method=adasplit", [0.3, 0.6], method=ADASPLIT, data={"name": data})
    return shared(samples_of(folder))


def test_kinds_with_the_same_data_are_compared(tmp_path):
    (share,) = write_pair(tmp_path, data="digits")
    assert share.name == ""
    assert [sample.label for sample in share.samples] == ["adasplit", "fedavg"]


def test_kinds_with_other_data_are_kept_apart(tmp_path):
    shares = write_pair(tmp_path, data="mnist")
    assert {share.name: [one.label for one in share.samples] for share in shares} == {
        SPLIT: ["adasplit"],
        FEDERATED: ["fedavg"],
    }
    assert sorted(at for share in shares for at, _ in share.members) == [0, 1]


def boxes_of(axes):
    renderer = FigureCanvasAgg(axes.figure).get_renderer()
    named = [text for text in axes.texts if text.get_text()]
    return [text.get_window_extent(renderer) for text in named]


@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_seventeen_names_cover_neither_one_another_nor_leave_the_axes(spread):
    figure, axes = canvas(5.0)
    chance = np.random.default_rng(3)
    places = chance.uniform(0.45, 0.55, (17, 2)) * [1, 1 + spread]
    axes.scatter(places[:, 0], places[:, 1])
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.5)
    points = [(x, y, 8.0) for x, y in places]
    place_labels(figure, axes, points, [(f"kappa 0.{at}", "normal") for at in range(17)])
    boxes = boxes_of(axes)
    assert len(boxes) == 17
    frame = axes.get_window_extent()
    for at, box in enumerate(boxes):
        assert frame.x0 <= box.x0 < box.x1 <= frame.x1
        assert frame.y0 <= box.y0 < box.y1 <= frame.y1
        assert not any(box.overlaps(other) for other in boxes[at + 1 :])
