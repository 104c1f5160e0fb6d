"""Decide which groups of runs can be compared: those that trained on the same data."""

from dataclasses import dataclass
from typing import get_args

import msgspec

from pliant.analysis.history import GroupHistory

FEDERATED, SPLIT = "federated methods", "split methods"


@dataclass(frozen=True, eq=False)
class ComparableGroups:
    """Groups that belong on the same axes, each with its index in the report."""

    name: str  # empty where all groups are comparable
    members: tuple[tuple[int, GroupHistory], ...]

    @property
    def group_histories(self) -> list[GroupHistory]:
        """Return the groups without their indices."""
        return [history for _, history in self.members]


def get_method_kind(group_history: GroupHistory) -> str:
    """Return whether a group's method is federated or splits the network."""
    from pliant.split import AnySplit

    split_tags = {method.__struct_config__.tag for method in get_args(AnySplit)}
    config = group_history.group.first_run.config.get("method", {})
    return SPLIT if config.get("type") in split_tags else FEDERATED


def group_comparable(group_histories: list[GroupHistory]) -> list[ComparableGroups]:
    """Divide groups by kind of method where the kinds have no data in common, as in `pliant demo`.

    Curves on the same axes invite a comparison.
    """
    numbered = tuple(enumerate(group_histories))
    by_kind: dict[str, list[tuple[int, GroupHistory]]] = {}
    for index, history in numbered:
        by_kind.setdefault(get_method_kind(history), []).append((index, history))
    data = [{_encode_data_config(history) for _, history in kind} for kind in by_kind.values()]
    if len(data) < 2 or set.intersection(*data):
        return [ComparableGroups("", numbered)]
    return [ComparableGroups(name, tuple(members)) for name, members in by_kind.items()]


def _encode_data_config(group_history: GroupHistory) -> bytes:
    return msgspec.json.encode(group_history.group.first_run.config.get("data"), order="sorted")
