import numpy as np
import pytest

from pliant.analysis.search_plots import (
    CostLossPoints,
    draw_rate_comparison,
    draw_search_fronts,
    draw_step_costs,
    draw_table_rates,
)
from pliant.nn.pareto_table import ParetoTable

pytest.importorskip("matplotlib")
PNG_PREFIX = b"\x89PNG"


def test_four_figures_are_drawn(tmp_path):
    rng = np.random.default_rng(0)
    trials = CostLossPoints("trials", rng.random(30), rng.random(30))
    line = CostLossPoints("equal rates", np.array([1.0, 0.0, 0.5]), np.array([0.0, 1.0, 0.4]))
    table = ParetoTable(
        "net", ((0.5, 0.5), (0.5, 0.0), (0.0, 0.0)), (0.3, 0.6, 1.0), (0.1, 0.2, 0.3)
    )
    share = np.linspace(0, 0.5, 5)
    paths = [
        draw_search_fronts(tmp_path / "front.png", trials, [line]),
        draw_table_rates(tmp_path / "vectors.png", table),
        draw_step_costs(tmp_path / "costs.png", share, (1 - share) ** 2, 1 - share, "a network"),
        draw_rate_comparison(
            tmp_path / "rates.png", ["a", "b"], ("one", "two"), {"half": [(0.5, 0.0), (0.0, 0.5)]}
        ),
    ]
    assert all(path.read_bytes().startswith(PNG_PREFIX) for path in paths)
