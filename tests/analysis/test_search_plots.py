import numpy as np
import pytest

from pliant.analysis.pareto_plot import (
    CostLossPoints,
    draw_rate_vectors,
    draw_search_fronts,
    make_rate_vectors,
)
from pliant.bench.profile import StepTimeFit, draw_fit
from pliant.nn.pareto_table import ParetoTable
from pliant.table_search import StepTimeModel
from pliant.value import encode

pytest.importorskip("matplotlib")
PNG_PREFIX = b"\x89PNG"


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
