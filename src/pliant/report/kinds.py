"""Which runs can be compared: federated and split ones where they have the same data."""

from dataclasses import dataclass
from typing import get_args

import msgspec

from pliant.report.history import Sample

FEDERATED, SPLIT = "federated methods", "split methods"


@dataclass(frozen=True, eq=False)
class Share:
    """Groups that belong on the same axes, each with its number in the whole report."""

    name: str  # empty where there is only one share
    members: tuple[tuple[int, Sample], ...]

    @property
    def samples(self) -> list[Sample]:
        """Return the groups."""
        return [sample for _, sample in self.members]


def kind(sample: Sample) -> str:
    """Tell whether a group's method is a federated one or splits the network."""
    from pliant.split import AnySplit

    tags = {one.__struct_config__.tag for one in get_args(AnySplit)}
    asked = sample.group.first.config.get("method", {})
    return SPLIT if asked.get("type") in tags else FEDERATED


def shared(samples: list[Sample]) -> list[Share]:
    """Divide groups by kind where the kinds have no data in common, as in `pliant demo`.

    A reader would take two curves on the same axes for rivals.
    """
    numbered = tuple(enumerate(samples))
    by_kind: dict[str, list[tuple[int, Sample]]] = {}
    for at, sample in numbered:
        by_kind.setdefault(kind(sample), []).append((at, sample))
    seen = [{_data(sample) for _, sample in members} for members in by_kind.values()]
    if len(seen) < 2 or set.intersection(*seen):
        return [Share("", numbered)]
    return [Share(name, tuple(members)) for name, members in by_kind.items()]


def _data(sample: Sample) -> bytes:
    return msgspec.json.encode(sample.group.first.config.get("data"), order="sorted")
