import numpy as np
import pytest

from pliant.explore.pictures import Points, draw_costs, draw_fronts, draw_rates, draw_vectors
from pliant.explore.table import Table

pytest.importorskip("matplotlib")
HEAD = b"\x89PNG"


def test_four_pictures_are_drawn(tmp_path):
    rng = np.random.default_rng(0)
    tried = Points("tried", rng.random(30), rng.random(30))
    line = Points("equal rates", np.array([1.0, 0.0, 0.5]), np.array([0.0, 1.0, 0.4]))
    table = Table("net", ((0.5, 0.5), (0.5, 0.0), (0.0, 0.0)), (0.3, 0.6, 1.0), (0.1, 0.2, 0.3))
    share = np.linspace(0, 0.5, 5)
    paths = [
        draw_fronts(tmp_path / "front.png", tried, [line]),
        draw_vectors(tmp_path / "vectors.png", table),
        draw_costs(tmp_path / "costs.png", share, (1 - share) ** 2, 1 - share, "a network"),
        draw_rates(
            tmp_path / "rates.png", ["a", "b"], ("one", "two"), {"half": [(0.5, 0.0), (0.0, 0.5)]}
        ),
    ]
    assert all(path.read_bytes().startswith(HEAD) for path in paths)
