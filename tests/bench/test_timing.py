import itertools

from pliant.bench.timing import MIN_REPEATS, measure_ratio


def test_a_ratio_does_not_depend_on_when_the_machine_slows_down():
    now, slowdown, order = 0.0, 1.0, []

    def make_run(name, duration):
        def run():
            nonlocal now, slowdown
            order.append(name)
            slowdown = 5.0 if len(order) > 9 else 1.0  # from the middle of the third pair
            now += duration * slowdown

        return run

    step, reference = make_run("step", 3.0), make_run("reference", 4.0)
    assert measure_ratio(step, reference, seconds=0.0, clock=lambda: now) == 0.75
    pairs = list(zip(order[4::2], order[5::2], strict=True))  # after warming up and counting
    assert len(pairs) == MIN_REPEATS
    assert all(first == second[::-1] for first, second in itertools.pairwise(pairs))
