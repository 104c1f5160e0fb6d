"""The base class of all settings: frozen, validated, hashable, readable from TOML."""

import math
from functools import cache
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from pliant.suggestions import explain_error

NonNegative = Annotated[float, Meta(ge=0.0)]
Positive = Annotated[float, Meta(gt=0.0)]
Rounds = Annotated[int, Meta(ge=1, le=10**9)]
Numbers = int | float | tuple[int | float, ...]  # one, or a list of them
Fraction = Annotated[float, Meta(ge=0.0, le=1.0)]
Count = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]

V = TypeVar("V")


class Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A frozen value that validates its fields.

    msgspec validates what it decodes; this class also validates what Python code constructs, with
    the same messages.

    >>> from pliant.value import NonNegative, Value
    >>> class Spring(Value, frozen=True, tag="spring"):
    ...     mu: NonNegative = 0.01
    >>> Spring(mu=-1.0)
    Traceback (most recent call last):
    ValueError: Expected `float` >= 0.0 - at `$.mu` of Spring, got -1.0
    """

    def __post_init__(self) -> None:
        for name, kind in _list_fields(type(self)):
            value = getattr(self, name)
            try:
                checked = msgspec.convert(value, kind)
            except msgspec.ValidationError as error:
                raise ValueError(_locate_error(str(error), name, self)) from None
            if (path := _find_infinite(checked)) is not None:
                message = f"Expected a finite number - at `${path}`"
                raise ValueError(_locate_error(message, name, self))
            if checked is not value:  # an int converted to float, a list to a tuple
                msgspec.structs.force_setattr(self, name, checked)


@cache
def _list_fields(kind: type[Value]) -> tuple[tuple[str, Any], ...]:
    return tuple((field.name, field.type) for field in msgspec.structs.fields(kind))


def _find_infinite(value: Any) -> str | None:
    """Return the path to a number that is not finite: empty for the value itself, None if none."""
    if isinstance(value, float):
        return None if math.isfinite(value) else ""
    is_dict, is_sequence = isinstance(value, dict), isinstance(value, tuple | list)
    for key, item in value.items() if is_dict else enumerate(value) if is_sequence else ():
        if (path := _find_infinite(item)) is not None:
            return f"[{key}]{path}"
    return None


def _locate_error(message: str, name: str, owner: Value) -> str:
    head, _, inner = message.partition(" - at `$")
    path = f"$.{name}{inner.rstrip('`')}"
    return f"{head} - at `{path}` of {type(owner).__name__}, got {getattr(owner, name)!r}"


def decode(raw: Any, kind: type[V]) -> V:
    """Convert plain data from TOML or JSON to a value, or say what was expected and where."""
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise ValueError(explain_error(str(error), raw, kind)) from None


def encode(value: Any) -> Any:
    """Convert a value to plain data that `decode` reads."""
    return msgspec.to_builtins(value)


def describe_difference(old: Any, new: Any, key: str = "") -> str | None:
    """Name the first key in which two pieces of plain data differ, with both values.

    >>> describe_difference({"seed": 0, "rules": {"grace": 0.1}}, {"seed": 0, "rules": {}})
    'rules.grace = 0.1, not absent'
    """
    if isinstance(old, dict) and isinstance(new, dict):
        for name in dict.fromkeys([*old, *new]):
            values = old.get(name, msgspec.UNSET), new.get(name, msgspec.UNSET)
            difference = describe_difference(*values, f"{key}.{name}" if key else name)
            if difference is not None:
                return difference
        return None
    return None if old == new else f"{key} = {_shorten(old)}, not {_shorten(new)}"


def _shorten(value: Any) -> str:
    if value is msgspec.UNSET:
        return "absent"
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 60 else f"{text[:57]}..."
