"""The front of a search, against a front by exhaustion."""

from hypothesis import given
from hypothesis import strategies as st

from pliant.dashboard.trials import COST, KEPT, Search, front

number = st.integers(0, 6).map(lambda value: value / 6)


@given(points=st.lists(st.tuples(number, number), max_size=20))
def test_the_front_is_what_nobody_dominates(points):
    def beaten(point):
        return any(
            other != point and other[0] <= point[0] and other[1] >= point[1] for other in points
        )

    assert front(points) == sorted({point for point in points if not beaten(point)})


def test_points_lie_at_their_cost_where_every_record_tells_it(tmp_path):
    path = tmp_path / "trials.jsonl"
    told = '{"rates":[0.5,0.0],"accuracy":0.25,"cost":0.625}\n'
    path.write_text(told + '{"rates":[0.5,0.0],"accuracy":0.75,"cost":0.625}\n')
    search = Search(path)
    search.feed()
    assert search.shown() == {"cost": COST, "points": [(0.625, 0.5)], "front": [(0.625, 0.5)]}
    with path.open("a") as file:
        file.write('{"rates":[0.0,0.0],"accuracy":0.75}\n')
    search.feed()
    shown = search.shown()
    assert (shown["cost"], shown["points"]) == (KEPT, [(0.75, 0.5), (1.0, 0.75)])
