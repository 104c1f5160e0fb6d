"""The front of a search, against a front by exhaustion."""

from hypothesis import given
from hypothesis import strategies as st

from pliant.dashboard.trials import front

number = st.integers(0, 6).map(lambda value: value / 6)


@given(points=st.lists(st.tuples(number, number), max_size=20))
def test_the_front_is_what_nobody_dominates(points):
    def beaten(point):
        return any(
            other != point and other[0] <= point[0] and other[1] >= point[1] for other in points
        )

    assert front(points) == sorted({point for point in points if not beaten(point)})
