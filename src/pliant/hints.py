"""What a wrong key or name was probably meant to be."""

import difflib
import re
from collections.abc import Iterable
from typing import Any

from msgspec import inspect

_PLACE = r"(?: - at `\$(?P<path>.*)`)?$"
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<name>[^`]*)`" + _PLACE)
_MISSING = re.compile(r"^Object missing required field `(?P<name>[^`]*)`" + _PLACE)
_INVALID = re.compile(r"^Invalid (?:enum )?value (?P<name>.+?)" + _PLACE)
_OTHER = re.compile(r"^(?P<name>.*) - at `\$(?P<path>.*)`$")
_KIND = re.compile(r", got `\w+`$")
_STEP = re.compile(r"\.(\w+)|\[(\d+|\.\.\.)\]")
_TABLE = {"`object`": "a table", "`array`": "a list", "`str`": "a text"}


def explained(message: str, raw: Any, kind: Any) -> str:
    """Say what a msgspec error means for who wrote the data: the key's path and the right names."""
    info = inspect.type_info(kind)
    if found := _UNKNOWN.match(message):
        steps, name = _steps(found["path"]), found["name"]
        known = _keys(_chosen(*_walked(info, raw, steps)))
        return f"unknown key `{_joined(steps, name)}`{nearest(name, known)}"
    if found := _MISSING.match(message):
        return f"expected a key `{_joined(_steps(found['path']), found['name'])}`, found none"
    if found := _INVALID.match(message):
        steps = _steps(found["path"])
        known = _words(info, raw, steps)
        if known:
            meant = nearest(found["name"].strip("'\""), known)
            return f"unknown `{_joined(steps)}` = {found['name']}{meant}"
    return _other(message, raw)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of a sentence about a wrong name: the likeliest right one, and all of them.

    >>> from pliant.hints import nearest
    >>> nearest("fedavgg", ["fedavg", "distreal"])
    "; did you mean 'fedavg'? There are distreal, fedavg"
    """
    names = sorted(known)
    close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.6)
    guess = f"did you mean {close[0]!r}? There are" if close else "there are"
    return f"; {guess} {', '.join(names)}" if names else ""


def _other(message: str, raw: Any) -> str:
    """Say where and what the data is, in the words of who wrote it."""
    found = _OTHER.match(message)
    if found is None:
        return message
    steps = _steps(found["path"])
    text = _KIND.sub("", found["name"]).replace(" - at `$.", " at `")
    for word, plain in _TABLE.items():
        text = text.replace(word, plain)
    if " got " in text:  # a value's own check, which says it
        return f"{text}, in `{_joined(steps)}`"
    for step in steps:
        try:
            raw = raw[int(step)] if isinstance(raw, list | tuple) else raw[step]
        except (KeyError, IndexError, TypeError, ValueError):
            return f"{text} at `{_joined(steps)}`"
    return f"{text} at `{_joined(steps)}`, got {raw!r}"


def _steps(path: str | None) -> list[str]:
    return [name or index for name, index in _STEP.findall(path or "")]


def _joined(steps: Iterable[str], last: str | None = None) -> str:
    return ".".join([*steps, last] if last is not None else steps)


def _walked(kind: inspect.Type, raw: Any, steps: list[str]) -> tuple[inspect.Type, Any]:
    """Return the type and the data at a path."""
    for step in steps:
        chosen = _chosen(kind, raw)
        if isinstance(chosen, inspect.StructType):
            fields = {field.encode_name: field.type for field in chosen.fields}
            kind = fields.get(step, inspect.AnyType())
            raw = raw.get(step) if isinstance(raw, dict) else None
        elif isinstance(chosen, inspect.VarTupleType | inspect.ListType):
            kind = chosen.item_type
            raw = raw[int(step)] if step.isdigit() and isinstance(raw, list | tuple) else None
        else:
            return inspect.AnyType(), None
    return kind, raw


def _chosen(kind: inspect.Type, raw: Any) -> inspect.Type:
    """Return one type of several: the one whose tag is in the data."""
    if not isinstance(kind, inspect.UnionType):
        return kind
    tag = raw.get("type") if isinstance(raw, dict) else None
    structs = _structs(kind)
    for part in structs:
        if part.tag == tag:
            return part
    return structs[0] if structs else kind


def _structs(kind: inspect.Type) -> list[inspect.StructType]:
    parts = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    return [part for part in parts if isinstance(part, inspect.StructType)]


def _keys(kind: inspect.Type) -> list[str]:
    if not isinstance(kind, inspect.StructType):
        return []
    tag = [kind.tag_field] if kind.tag_field else []
    return [*tag, *(field.encode_name for field in kind.fields)]


def _words(kind: inspect.Type, raw: Any, steps: list[str]) -> list[str]:
    """Return what may stand at a path: a choice of words, or the tags of alternatives."""
    here, _ = _walked(kind, raw, steps)
    if isinstance(here, inspect.LiteralType):
        return [str(value) for value in here.values]
    owner, _ = _walked(kind, raw, steps[:-1])
    return [str(part.tag) for part in _structs(owner) if part.tag is not None]
