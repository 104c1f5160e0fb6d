"""Typed states: what a server or a device keeps between rounds, as named tensors and back."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from inspect import formatannotation
from operator import index
from typing import Any, TypeVar, get_args, get_type_hints

import torch
from torch import Tensor

from pliant.methods.base import ServerState
from pliant.methods.verbs import HasDeviceState, HasServerState, Method
from pliant.params import Params, flatten, group_subtrees, select_subtree

S = TypeVar("S")

_DICTS = (Params, dict[int, Tensor], dict[str, Params], dict[int, Params])


def init_states(method: Method, params: Params) -> tuple[Any, Any]:
    """Return the states of the server and of a device before the first round."""
    return init_server_state(method, params), init_device_state(method, params)


def init_server_state(method: Method, params: Params) -> Any:
    """Return the server's state before the first round; refuse one that cannot be saved."""
    state = method.init_state(params) if isinstance(method, HasServerState) else ServerState(params)
    if "params" not in _get_field_types(type(state)):
        raise ValueError(f"{type(state).__name__}: expected a field `params`, found none")
    return state


def init_device_state(method: Method, params: Params) -> Any:
    """Return a device's state before its first task, or None if devices keep nothing."""
    state = method.init_device_state(params) if isinstance(method, HasDeviceState) else None
    if state is not None:
        _get_field_types(type(state))
    return state


def flatten_state(state: Any) -> Params:
    """Return the tensors of a state by name; None has none.

    A single dictionary other than `params` is stored without its field's name.

    >>> import torch
    >>> import pliant as pl
    >>> from pliant.methods.scaffold import ScaffoldDeviceState
    >>> from pliant.methods.state import flatten_state
    >>> flatten_state(pl.ServerState({"weight": torch.zeros(1)}))
    {'params/weight': tensor([0.])}
    >>> flatten_state(ScaffoldDeviceState({"weight": torch.zeros(1)}))
    {'weight': tensor([0.])}
    """
    if state is None:
        return {}
    types = _get_field_types(type(state))
    values = {name: _encode(getattr(state, name), types[name]) for name in types}
    return flatten(next(iter(values.values())) if _is_unnamed(types) else values)


def build_state(kind: type[S], tensors: Mapping[str, Tensor]) -> S:
    """Build a state from the tensors that `flatten_state` returned."""
    types = _get_field_types(kind)
    values: dict[str, Any] = {}
    for name, hint in types.items():
        if hint in _DICTS:
            key_type, value_type = get_args(hint)
            subtree = dict(tensors) if _is_unnamed(types) else select_subtree(tensors, name)
            items = subtree if value_type is Tensor else group_subtrees(subtree)
            values[name] = {key_type(key): value for key, value in items.items()}
        elif name in tensors:
            values[name] = tensors[name] if hint is Tensor else hint(tensors[name])
        else:
            raise ValueError(f"{kind.__name__}: expected a saved tensor `{name}`, found none")
    return kind(**values)


def _get_field_types(kind: type) -> dict[str, Any]:
    """Return the type of each field; refuse those that cannot be saved."""
    if not is_dataclass(kind):
        raise ValueError(f"Expected a dataclass as the state of a method, got {kind.__name__}")
    try:
        hints = get_type_hints(kind)
    except NameError as error:
        raise ValueError(f"{kind.__name__}: expected known types, got {error}") from None
    for field in fields(kind):
        if hints[field.name] not in (Tensor, int, float, *_DICTS):
            raise ValueError(
                f"{kind.__name__}.{field.name}: expected a Tensor, an int, a float, or a dict of "
                f"tensors or of Params by str or int, got {formatannotation(hints[field.name])}"
            )
    return {field.name: hints[field.name] for field in fields(kind)}


def _is_unnamed(types: dict[str, Any]) -> bool:
    """Return whether the tensors of the only field are stored under their own names."""
    return len(types) == 1 and "params" not in types and set(types.values()) <= set(_DICTS)


def _encode(value: Any, hint: Any) -> Any:
    if hint is int:
        return torch.tensor(index(value))
    return torch.tensor(value, dtype=torch.float64) if hint is float else value
