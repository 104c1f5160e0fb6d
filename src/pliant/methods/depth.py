"""Local training of the first stages of a network with exits, as if they were all of it."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain

from pliant.methods.base import Step, StepFn, Task, Update, count_steps, train_locally
from pliant.nn.elastic import Elastic
from pliant.nn.optimisers import Optimiser
from pliant.params import Params


def check_exits(params: Params) -> None:
    """Raise, before a run begins, if a network has no exits."""
    if not any(name.startswith("exits.") for name in params):
        raise ValueError("Expected a network with exits (pliant.ExitNetwork), got one without")


def count_macs(part: Elastic) -> float:
    """Return the MACs per sample of a training step of all of a part."""
    return part.macs(part.full, training=True)


def peek_row(steps: Iterable[Step]) -> tuple[int, Iterable[Step]]:
    """Return the row of the first step, 0 if there is none, and all steps."""
    iterator = iter(steps)
    first = next(iterator, None)
    return (0, ()) if first is None else (first.row, chain((first,), iterator))


def train_part(
    net: Elastic,
    part: Elastic,
    task: Task,
    steps: Iterable[Step],
    optimiser: Optimiser,
    step_fn: StepFn | None = None,
) -> Update:
    """Train a part of the network on all of its filters; the other layers stay as they are."""
    part_steps = (replace(step, subnet=part.full) for step in steps)
    update = train_locally(part, task, part_steps, optimiser, step_fn=step_fn)
    return replace(update, subnet_steps=count_steps([net.full] * update.steps))
