"""The base of all that a user can write down: frozen, checked, hashable, readable from TOML."""

import math
from functools import cache
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from pliant.hints import explained

NonNegative = Annotated[float, Meta(ge=0.0)]
Positive = Annotated[float, Meta(gt=0.0)]
Fraction = Annotated[float, Meta(ge=0.0, le=1.0)]
Count = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]

V = TypeVar("V")


class Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A frozen description that checks its fields however it was made.

    msgspec checks what it decodes; this class also checks what Python code constructs, with the
    same messages, so that a wrong number is refused where it is written down.

    >>> from pliant.value import NonNegative, Value
    >>> class Spring(Value, frozen=True, tag="spring"):
    ...     mu: NonNegative = 0.01
    >>> Spring(mu=-1.0)
    Traceback (most recent call last):
    ValueError: Expected `float` >= 0.0 - at `$.mu` of Spring, got -1.0
    """

    def __post_init__(self) -> None:
        for name, kind in _fields(type(self)):
            given = getattr(self, name)
            try:
                checked = msgspec.convert(given, kind)
            except msgspec.ValidationError as error:
                raise ValueError(_located(str(error), name, type(self).__name__, given)) from None
            if isinstance(checked, float) and not math.isfinite(checked):
                raise ValueError(
                    f"Expected a finite number - at `$.{name}` of {type(self).__name__}, "
                    f"got {given!r}"
                )
            if checked is not given:  # an int where a float is meant, a list where a tuple is
                msgspec.structs.force_setattr(self, name, checked)


@cache
def _fields(kind: type[Value]) -> tuple[tuple[str, Any], ...]:
    return tuple((field.name, field.type) for field in msgspec.structs.fields(kind))


def _located(message: str, name: str, owner: str, given: object) -> str:
    head, found, inner = message.partition(" - at `$")
    path = f"$.{name}{inner.rstrip('`')}" if found else f"$.{name}"
    return f"{head} - at `{path}` of {owner}, got {given!r}"


def decode(raw: Any, kind: type[V]) -> V:
    """Turn plain data (what TOML or JSON gives) into a value, or say what was wanted and where."""
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise ValueError(explained(str(error), raw, kind)) from None


def encode(value: Any) -> Any:
    """Turn a value into plain data that `decode` takes back."""
    return msgspec.to_builtins(value)
