"""The rounds of runs and of groups of runs, by column."""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from pliant.analysis.records import RoundFields, read_rounds, read_tasks
from pliant.analysis.runs import RunFolder, RunGroup

Floats = NDArray[np.float64]

COLUMNS = (
    "round", "seconds", "tasks", "merged", "samples", "steps", "macs", "useful", "available",
    "down", "up", "busy", "joules", "loss", "accuracy", "test_loss",
)  # fmt: skip
FEDERATED, SPLIT = "federated methods", "split methods"


@dataclass(frozen=True, eq=False)
class RunHistory:
    """The rounds of one run."""

    run: RunFolder
    rounds: list[RoundFields]

    @cached_property
    def columns(self) -> dict[str, Floats]:
        """Return the rounds by column; numbers that are not known are NaN."""
        return {
            name: np.array([getattr(record, name) for record in self.rounds], np.float64)
            for name in COLUMNS
        }

    def __getitem__(self, name: str) -> Floats:
        return self.columns[name]

    def axis(self, name: str) -> Floats:
        """Return rounds, virtual seconds, MACs or bytes so far, at the end of each round."""
        match name:
            case "rounds":
                return self["round"] + 1
            case "seconds":
                return self["seconds"]
            case "macs":
                return np.cumsum(self["macs"])
            case _:
                return np.cumsum(self["down"] + self["up"])

    def total(self, *names: str) -> float:
        return float(sum(self[name].sum() for name in names))

    @property
    def final_accuracy(self) -> float | None:
        accuracies = (record.accuracy for record in reversed(self.rounds))
        return next((accuracy for accuracy in accuracies if accuracy is not None), None)


@dataclass(frozen=True)
class TaskTimeline:
    """When the mini-batches of one device ran in one round, in seconds since the run's start."""

    round: int
    device: int
    outcome: str
    spans: tuple[tuple[float, float], ...]  # the deadline may have cut off the last one
    rows: tuple[int, ...]


def load_task_timelines(
    history: RunHistory, first_round: int, round_count: int
) -> list[TaskTimeline]:
    """Read when each mini-batch of some rounds ran."""
    round_ends = {record.round: record.seconds for record in history.rounds}
    timelines = []
    for task in read_tasks(history.run.folder, first_round + round_count - 1):
        if task.round < first_round or task.round not in round_ends or not task.starts:
            continue
        start = round_ends.get(task.round - 1, 0.0)
        ends = task.complete_ends(round_ends[task.round] - start)
        spans = tuple(
            (start + low, start + high) for low, high in zip(task.starts, ends, strict=True)
        )
        timelines.append(
            TaskTimeline(task.round, task.device, task.outcome, spans, tuple(task.rows))
        )
    return sorted(timelines, key=lambda timeline: (timeline.round, timeline.device))


@dataclass(frozen=True, eq=False)
class GroupHistory:
    """A group with the histories of its runs."""

    group: RunGroup
    histories: list[RunHistory]
    index: int = 0  # in the report

    @property
    def label(self) -> str:
        return self.group.label

    def total(self, name: str) -> float:
        return sum(history.total(name) for history in self.histories)

    @property
    def outcome_counts(self) -> Counter[str]:
        counts = Counter[str]()
        for history in self.histories:
            for record in history.rounds:
                counts.update(record.outcomes)
        return counts

    @property
    def kind(self) -> str:
        """Return whether the method is federated or splits the network."""
        from pliant.split import AnySplit

        split_tags = {method.__struct_config__.tag for method in get_args(AnySplit)}
        config = self.group.first_run.config.get("method", {})
        return SPLIT if config.get("type") in split_tags else FEDERATED


def load_group_histories(groups: list[RunGroup]) -> list[GroupHistory]:
    """Read the histories of all groups that have a finished round."""
    group_histories: list[GroupHistory] = []
    for group in groups:
        histories = [RunHistory(run, read_rounds(run.folder)) for run in group.runs]
        finished = [history for history in histories if history.rounds]
        if finished:
            group_histories.append(GroupHistory(group, finished, len(group_histories)))
    return group_histories


def group_comparable(group_histories: list[GroupHistory]) -> dict[str, list[GroupHistory]]:
    """Divide groups by kind of method where the kinds have no data in common, as in `pliant demo`.

    Curves on the same axes invite a comparison. The name is empty if all groups are comparable.
    """
    by_kind: dict[str, list[GroupHistory]] = {}
    for group in group_histories:
        by_kind.setdefault(group.kind, []).append(group)
    data = [{_encode_data_config(group) for group in groups} for groups in by_kind.values()]
    return {"": group_histories} if len(data) < 2 or set.intersection(*data) else by_kind


def _encode_data_config(group_history: GroupHistory) -> bytes:
    return msgspec.json.encode(group_history.group.first_run.config.get("data"), order="sorted")
