from dataclasses import replace

import numpy as np
import pytest

from pliant.analysis.pareto_plot import (
    CostLossPoints,
    draw_pareto_front,
    draw_rate_vectors,
    draw_search_fronts,
    load_rate_vectors,
    make_rate_vectors,
    normalise_front,
)
from pliant.bench.profile import StepTimeFit, draw_fit
from pliant.nn.pareto_table import ParetoTable
from pliant.nn.table_file import save_table
from pliant.table_search import StepTimeModel
from pliant.value import encode

pytest.importorskip("matplotlib")
PNG_PREFIX = b"\x89PNG"


def test_points_are_marked_by_their_side():
    line = CostLossPoints(
        "table", np.array([0.0, 0.5, 1.0]), np.array([1.0, 0.4, 0.0]), (16, 16, None)
    )
    plain = CostLossPoints("equal rates", np.array([0.0, 1.0]), np.array([1.0, 0.0]))
    figure = draw_search_fronts(CostLossPoints("tried", np.zeros(1), np.zeros(1)), [line, plain])
    (axes,) = figure.figure.axes
    marked = {p.get_label(): p.get_offsets().tolist() for p in axes.collections}
    assert marked["side 16"] == [[0.0, 1.0], [0.5, 0.4]]
    assert marked["full side"] == [[1.0, 0.0]]


def test_equal_rates_of_the_search_are_on_every_front(tmp_path):
    rates = ((0.5, 0.0), (0.0, 0.0))
    table = ParetoTable("net", rates, (0.25, 1.0), (0.3, 0.4))
    gains = (0.2, 0.4, 0.1, 0.4)
    staged = ParetoTable("net", rates * 2, (0.25, 1.0) * 2, gains, stages=(0, 0, 0.5, 0.5))
    equal = [[(0.25, 0.1), (0.5, 0.2), (1.0, 0.4)], [(0.25, 0.0), (1.0, 0.3)]]
    save_table(tmp_path / "a" / "table.safetensors", table, {"equal_rates": equal[:1]})
    save_table(tmp_path / "b" / "table.safetensors", staged, {"equal_rates": equal})
    save_table(
        tmp_path / "c" / "table.safetensors", ParetoTable("n", rates, (0.2, 1.0), (0.1, 0.2))
    )
    first, early, late, without = load_rate_vectors([tmp_path], [])
    assert [v.equal_rates.tolist() for v in (first, early)] == [[list(p) for p in equal[0]]] * 2
    assert late.equal_rates.tolist() == [list(pair) for pair in equal[1]]
    (axes,) = draw_pareto_front([first]).figure.axes
    assert axes.lines[1].get_xydata().tolist() == first.equal_rates.tolist()
    assert axes.lines[1].get_label() == "equal rates"
    assert ("equal rates", "", 0.5, 0.2) in draw_pareto_front([first]).rows
    early_gain = replace(first, gains=np.array([0.4, 0.4]))
    assert draw_pareto_front([early_gain]).conclusion == (
        "a: steps of 25% of the cost reach 100% of the full network's gain in a short training, "
        "equal rates for all sites 25%."
    )
    assert "equal rates for all sites were not measured" in draw_pareto_front([without]).conclusion
    lines = normalise_front(first)
    assert [line.name for line in lines] == ["table, at fresh seeds", "equal rates, at fresh seeds"]
    assert lines[1].costs.tolist() == pytest.approx([0.0, 1 / 3, 1.0])
    assert lines[1].losses.tolist() == pytest.approx([3.0, 2.0, 0.0])


def test_every_stage_of_a_table_is_drawn(tmp_path):
    rates = ((0.5, 0.5), (0.0, 0.0))
    staged = ParetoTable(
        "net",
        rates * 2,
        (0.1, 1.0, 0.2, 1.0),
        (0.3, 0.4, 0.1, 0.2),
        sides=(8, None, 8, None),
        stages=(0.0, 0.0, 0.5, 0.5),
    )
    save_table(tmp_path / "found" / "table.safetensors", staged)
    first, second = load_rate_vectors([tmp_path], [])
    assert (first.label, second.label) == ("found, stage 0", "found, stage 0.5")
    assert (second.shares.tolist(), second.sides) == ([0.2, 1.0], (8, None))
    figure = draw_pareto_front([first, second])
    assert [row[1:] for row in figure.rows] == [
        (0, 0.1, 0.3), (1, 1.0, 0.4), (0, 0.2, 0.1), (1, 1.0, 0.2),
    ]  # fmt: skip
    assert draw_rate_vectors(second).slug == "vectors-0-2"


def test_three_figures_are_drawn(tmp_path):
    rng = np.random.default_rng(0)
    trials = CostLossPoints("trials", rng.random(30), rng.random(30))
    line = CostLossPoints("equal rates", np.array([1.0, 0.0, 0.5]), np.array([0.0, 1.0, 0.4]))
    table = ParetoTable(
        "net", ((0.5, 0.5), (0.5, 0.0), (0.0, 0.0)), (0.3, 0.6, 1.0), (0.1, 0.2, 0.3)
    )
    model = StepTimeModel(start=1e-3, per_mac=2e-10, per_byte=3e-11, batch=32, error=0.05)
    fit = StepTimeFit("net", model, (0.0, 0.25), (1.0, 0.6), (2e-3, 1.5e-3))
    figures = {
        "front": draw_search_fronts(trials, [line]),
        "vectors": draw_rate_vectors(make_rate_vectors("net", "", encode(table))),
        "costs": draw_fit(fit),
    }
    for name, figure in figures.items():
        path = figure.save(tmp_path / f"{name}.png")
        assert path.read_bytes().startswith(PNG_PREFIX)
