"""The law of the line: whatever breaks, every question is done once, in order, and answered."""

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pliant.deploy.host import Limits
from pliant.deploy.split_device import SplitDevice
from pliant.deploy.split_frames import (
    Answer,
    BadFrame,
    Question,
    Ready,
    Welcome,
    framed,
    read_down,
    read_up,
    to_bytes,
    to_tensor,
)
from pliant.deploy.split_line import STRAY, WINDOW, Line, StrayAnswers
from pliant.split.client import Turn
from pliant.split.payload import Message


class Diary:
    """A client that writes down each mini-batch it has ended; its messages tell how many."""

    def __init__(self):
        self.pages, self.turn = [], None

    def ask(self, turn):
        assert self.turn is None
        self.turn = turn.step

    def message(self):
        return Message((len(self.pages),), b"x" * self.turn, b"")

    def learn(self, slope):
        self.pages.append(self.turn if slope is None else -self.turn)
        self.turn = None

    def restore(self, state):
        self.pages = state["pages"].tolist()

    def state(self):
        return {"pages": torch.tensor(self.pages, dtype=torch.int64)}


class Scribe(SplitDevice):
    def _built(self, described):
        return Diary()


class Wire:
    """Both ends of a line and the frames between them, moved one at a time."""

    def __init__(self, folder):
        self.folder, self.line = folder, Line(0, seconds=1e9)
        self.down, self.up, self.stream, self.told = [], [], 0, None
        self.kill()
        for _ in range(3):
            self.carry()
        assert self.line.join()
        self.line.ask("restore", tensors=Diary().state())

    def kill(self):
        self.device = Scribe(0, self.folder, Limits())
        self.cut()

    def cut(self):
        self.line.detach(self.stream)
        self.down, self.up, self.told = [], [], None
        self.stream = self.line.attach()

    def carry(self, steps="dau"):
        """Move a frame down the wire, let the device act on one, move one up."""
        if "d" in steps:
            frame, self.told = self.line.outgoing(self.stream, self.told, {}, wait=0.0)
            self.down += [frame] if frame else []
        if "a" in steps and self.down:
            head, tensors = read_down(self.down.pop(0))
            if isinstance(head, Welcome):
                self.up += self.device.greeted(head)
            else:
                frame = self.device.answered(head, tensors)
                self.up += [frame] if frame else []
        if "u" in steps and self.up:
            head, tensors = read_up(self.up.pop(0))
            if isinstance(head, Ready):
                self.line.ready(self.stream, head.epoch, head.done)
            else:
                self.line.heard(self.stream, head, tensors)

    def drain(self):
        for _ in range(4 * WINDOW):
            self.carry()


KINDS = ["talk", "mute", "d", "a", "u", "dau", "dau", "dau", "cut", "kill"]
EVENTS = st.lists(st.sampled_from(KINDS), min_size=10, max_size=60)


@settings(max_examples=60, deadline=None)
@given(events=EVENTS)
def test_whatever_breaks_each_mini_batch_is_done_once(events):
    with tempfile.TemporaryDirectory() as folder:
        wire, step, messages = Wire(Path(folder)), 0, []
        for event in events:
            if event in ("talk", "mute"):
                if len(wire.line._kept) > WINDOW - 2:
                    wire.drain()
                step += 1
                talks = event == "talk"
                turn = Turn(0, step, 0.1, talks=talks)
                number = wire.line.ask("ask", turn=turn, is_wanted=talks)
                wire.line.ask("learn", tensors={"slope": to_tensor(b"s")} if talks else None)
                messages += [(number, step)] if talks else []
            elif event in ("cut", "kill"):
                getattr(wire, event)()
            else:
                wire.carry(event)
        wire.drain()
        assert wire.line.settled()
        assert [abs(page) for page in wire.device._client.pages] == list(range(1, step + 1))
        for number, asked in messages:
            answer, tensors = wire.line.answer(number)
            assert answer.shape == (asked - 1,)  # what it had done before
            assert len(to_bytes(tensors["body"])) == asked


def test_no_more_than_a_window_is_under_way_and_who_is_silent_has_gone(tmp_path):
    now = [0.0]

    def clock():
        now[0] += 1.0
        return now[0]

    line = Line(0, seconds=5.0, clock=clock)
    stream = line.attach()
    epoch = line.epoch
    _, told = line.outgoing(stream, None, {}, wait=0.0)
    line.ready(stream, epoch, 0)
    assert line.join()
    asked = [line.ask("forget") for _ in range(WINDOW)]
    assert asked == list(range(1, WINDOW + 1))
    line._change.wait = lambda seconds: None  # the clock runs by itself
    assert line.ask("forget") is None  # nobody has answered: gone
    assert not line.is_in
    frame, told = line.outgoing(stream, told, {}, wait=0.0)
    assert read_down(frame)[0].epoch == told == line.epoch != epoch
    line.heard(stream, Answer(1, 1), {})  # of the epoch that is over
    line.ready(stream, epoch, 3)
    assert not line.join()
    line.ready(stream, line.epoch, 0)
    assert line.join()


def test_a_device_that_has_lost_its_place_begins_a_new_epoch(tmp_path):
    wire = Wire(tmp_path)
    wire.drain()
    wire.line.ask("ask", turn=Turn(0, 1, 0.1, talks=False))
    wire.line.ask("learn")
    wire.drain()
    epoch = wire.line.epoch
    (tmp_path / "split.ckpt").unlink()  # as after a loss of power
    wire.kill()
    wire.drain()
    assert wire.line.epoch != epoch
    assert not wire.line.is_in
    assert wire.line.join()


def test_a_flood_of_answers_is_cut(tmp_path):
    wire = Wire(tmp_path)
    wire.drain()
    for _ in range(STRAY):
        wire.line.heard(wire.stream, Answer(1, 1), {})
    with pytest.raises(StrayAnswers):
        wire.line.heard(wire.stream, Answer(999, 999), {})


def test_a_device_refuses_a_gap(tmp_path):
    wire = Wire(tmp_path)
    wire.drain()
    with pytest.raises(BadFrame, match="expected question 2, got 4"):
        wire.device.answered(Question(4, "forget"), {})


def test_a_frame_that_is_cut_is_refused():
    whole = framed(Answer(3, 2, 0.5, (1,)), {"body": torch.ones(2)})
    head = framed(Answer(3, 2, 0.5, (1,)))  # itself a frame, of an answer without tensors
    for cut in set(range(len(whole))) - {len(head)}:
        with pytest.raises(BadFrame):
            read_up(whole[:cut])
