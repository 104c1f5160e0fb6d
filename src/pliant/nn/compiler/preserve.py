"""Leave a network and all random generators as they were."""

import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

_CONTAINERS = (list, dict, set, deque)


class AttributeSnapshot:
    """The attributes of all modules of a network, and what its containers hold."""

    def __init__(self, net: nn.Module) -> None:
        self._attributes = {module: dict(vars(module)) for module in net.modules()}
        self._contents: list[tuple[Any, Any]] = []  # each container with its items
        seen: set[int] = set()
        for attributes in self._attributes.values():
            for value in attributes.values():
                self._collect(value, seen)

    def _collect(self, value: Any, seen: set[int]) -> None:
        if not isinstance(value, (*_CONTAINERS, tuple)) or id(value) in seen:
            return
        seen.add(id(value))
        items = list(value.values() if isinstance(value, dict) else value)
        if not isinstance(value, tuple):
            self._contents.append((value, dict(value) if isinstance(value, dict) else items))
        for item in items:
            self._collect(item, seen)

    def restore(self, *, only_tensors: bool = False) -> None:
        """Undo changes: all of them, or only those that left a tensor or a traced value."""
        for container, items in self._contents:
            if not only_tensors or holds_tensor(container):
                _refill(container, items)
        for module, saved in self._attributes.items():
            current = vars(module)
            for name in [*current]:
                if only_tensors and not holds_tensor(current[name]):
                    continue
                if name not in saved:
                    del current[name]
                elif current[name] is not saved[name]:
                    current[name] = saved[name]
            if not only_tensors:
                current.update(saved)  # also what was deleted


def _refill(container: Any, items: Any) -> None:
    if isinstance(container, dict):
        is_same = container.keys() == items.keys() and all(
            container[key] is value for key, value in items.items()
        )
    else:
        is_same = len(container) == len(items) and all(
            a is b for a, b in zip(container, items, strict=True)
        )
    if is_same:
        return
    container.clear()
    if isinstance(container, list | deque):
        container.extend(items)
    else:
        container.update(items)


def holds_tensor(value: Any) -> bool:
    """Return whether a value is or contains a tensor or a traced value."""
    waiting, seen = [value], set[int]()
    while waiting:
        item = waiting.pop()
        if isinstance(item, Tensor | fx.Proxy):
            return True
        if isinstance(item, (*_CONTAINERS, tuple)) and id(item) not in seen:
            seen.add(id(item))
            waiting.extend(item.values() if isinstance(item, dict) else item)
    return False


@contextmanager
def preserve(net: nn.Module) -> Iterator[AttributeSnapshot]:
    """Restore the network's attributes and all random generators on exit."""
    snapshot, states = AttributeSnapshot(net), get_random_states()
    try:
        yield snapshot
    finally:
        snapshot.restore()
        _set_random_states(states)


def switch_to_training(net: nn.Module) -> None:
    """Switch a network in evaluation mode to training; else each module keeps its own mode."""
    if not net.training:
        net.train()


def seed_generators(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)


def get_random_states() -> tuple[Any, ...]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call] # torch does not annotate it
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda


def _set_random_states(states: tuple[Any, ...]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    if states[3] is not None:
        torch.cuda.set_rng_state_all(states[3])


def list_drawn_generators(states: tuple[Any, ...]) -> list[str]:
    """Return the names of the generators that were used since these states."""
    current = get_random_states()
    names = ["random"] if current[0] != states[0] else []
    if any(not np.array_equal(a, b) for a, b in zip(current[1], states[1], strict=True)):
        names.append("numpy.random")
    return names if torch.equal(current[2], states[2]) else [*names, "torch"]
