"""The front of a search, against an exhaustive one."""

from hypothesis import given
from hypothesis import strategies as st

from pliant.dashboard.search_view import COST_LABEL, KEPT_LABEL, SearchView, select_pareto_front

number = st.integers(0, 6).map(lambda value: value / 6)


@given(points=st.lists(st.tuples(number, number), max_size=20))
def test_the_front_consists_of_the_undominated_points(points):
    def is_dominated(point):
        return any(
            other != point and other[0] <= point[0] and other[1] >= point[1] for other in points
        )

    undominated = {point for point in points if not is_dominated(point)}
    assert select_pareto_front(points) == sorted(undominated)


def test_points_are_placed_by_cost_if_every_record_has_one(tmp_path):
    path = tmp_path / "trials.jsonl"
    record = '{"rates":[0.5,0.0],"accuracy":0.25,"cost":0.625}\n'
    path.write_text(record + '{"rates":[0.5,0.0],"accuracy":0.75,"cost":0.625}\n')
    view = SearchView(path)
    view.read_more()
    assert view.get_front_data() == {
        "cost": COST_LABEL,
        "points": [(0.625, 0.5)],
        "front": [(0.625, 0.5)],
        "equal": [],
    }
    with path.open("a") as file:
        file.write('{"rates":[0.0,0.0],"accuracy":0.75}\n')
    view.read_more()
    data = view.get_front_data()
    assert (data["cost"], data["points"]) == (KEPT_LABEL, [(0.75, 0.5), (1.0, 0.75)])


def test_points_of_two_sides_or_stages_are_not_mixed(tmp_path):
    path = tmp_path / "trials.jsonl"
    record = '{"context":"a","rates":[0.0],"accuracy":0.25,"cost":1.0}\n'
    small = '{"context":"a","rates":[0.0],"accuracy":0.5,"cost":0.125,"side":8,"batch":0.5}\n'
    path.write_text(record + small)
    view = SearchView(path)
    view.read_more()
    assert view.get_front_data()["points"] == [(1.0, 0.25), (0.125, 0.5)]
    with path.open("a") as file:
        file.write(record.replace('"a"', '"b"').replace("0.25", "0.75"))
    view.read_more()
    assert view.get_front_data()["points"] == [(1.0, 0.75)]
    assert len(view) == 3


def test_equal_rates_of_whole_steps_are_a_curve(tmp_path):
    path = tmp_path / "trials.jsonl"
    line = '{{"rates":[{0},{1}],"accuracy":{2},"cost":{3}{4}}}\n'
    ends = line.format(0.5, 0.5, 0.2, 0.25, "") + line.format(0.0, 0.0, 0.8, 1.0, "")
    path.write_text(ends + line.format(0.5, 0.0, 0.9, 0.6, ""))
    view = SearchView(path)
    view.read_more()
    assert view.get_front_data()["equal"] == []  # both ends alone, which every search measures
    with path.open("a") as file:
        file.write(line.format(0.25, 0.25, 0.5, 0.5, "") + line.format(0, 0, 0.7, 0.1, ',"side":8'))
    view.read_more()
    assert view.get_front_data()["equal"] == [(0.25, 0.2), (0.5, 0.5), (1.0, 0.8)]
