"""The ledger of a round on real devices, by hand: also whoever leaves has used its time."""

from types import SimpleNamespace

import numpy as np
import pytest

from pliant.deploy.split_floor import LiveFloor
from pliant.deploy.split_frames import Answer
from pliant.deploy.split_line import Line
from pliant.devices import Fleet
from pliant.engine.split_book import Book
from pliant.split.base import Work
from pliant.split.client import Turn


@pytest.mark.parametrize("leaves", [False, True])
def test_seconds_are_those_of_all_mini_batches_also_of_a_device_that_leaves(leaves):
    now = [0.0]
    line = Line(0, 5.0, clock=lambda: now[0])
    stream = line.attach()
    line.ready(stream, line.epoch, 0)
    line.join()
    remote = SimpleNamespace(line=line, complaints=[])
    book = Book(10, [frozenset(range(10))], 1e6)
    fleet = Fleet(size=1, round_seconds=30.0)
    floor = LiveFloor(fleet, np.array([1e9]), {0: remote}, book, seed=0, clock=lambda: now[0])
    assert floor.present() == [0]
    for step in range(3):
        floor.compute(0, Work(1e6, 1e6, 16))
        asked = line.ask("ask", turn=Turn(0, step, 0.1))
        line.heard(stream, Answer(asked, asked), {})
        floor.compute(0, Work(2e6, 0.0, 0))
        asked = line.ask("learn")
        now[0] += 2.0
        line.heard(stream, Answer(asked, asked, seconds=2.0), {})
    if leaves:
        line.expel()
    now[0] += 5.0
    [task] = floor.records(0)
    assert task.end == ("partial" if leaves else "finished")
    assert (task.seconds, task.exchange.waited) == (6.0, 5.0)
    line.join()
    assert line.times == []  # the next round begins anew
