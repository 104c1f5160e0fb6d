"""Suggestions for a wrong key or name."""

import difflib
import re
from collections.abc import Iterable, Iterator
from typing import Any

from msgspec import inspect

_PATH = r"(?: - at `\$(?P<path>.*)`)?$"
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<name>[^`]*)`" + _PATH)
_MISSING = re.compile(r"^Object missing required field `(?P<name>[^`]*)`" + _PATH)
_INVALID = re.compile(r"^Invalid (?:enum )?value (?P<name>.+?)" + _PATH)
_OTHER = re.compile(r"^(?P<name>.*) - at `\$(?P<path>.*)`$")
_GOT_TYPE = re.compile(r", got `\w+`$")
_PATH_KEY = re.compile(r"\.(\w+)|\[(\d+|\.\.\.)\]")
_TYPE_WORDS = {"`object`": "a table", "`array`": "a list", "`str`": "a string"}

# Keys of 0.1 and their names since.
_RENAMED = {
    "by": "algorithm",
    "bytes": "size_factor",
    "early": "close_early",
    "evaluated": "eval_images",
    "fresh": "fresh_seeds",
    "full": "full_algorithm",
    "highest": "highest_rate",
    "normalisers": "corner_seeds",
    "number": "dtype",
    "over": "over_selection",
    "refined": "per_round",
    "squeeze": "compression",
    "thrift": "cost_exponent",
    "weigh": "weighting",
}
_RENAMED_LEAST = ("min_width", "min_design")  # `least`, in methods and in searches


def explain_error(message: str, raw: Any, kind: Any) -> str:
    """Turn a msgspec error into a line with the key's path and the names that are allowed there."""
    info = inspect.type_info(kind)
    if match := _UNKNOWN.match(message):
        steps, name = _split_path(match["path"]), match["name"]
        known = _list_keys(_select_type(*_follow_path(info, raw, steps)))
        if new := _find_renamed(name, known):
            return f"unknown key `{_join_path(steps, name)}`; it is now `{_join_path(steps, new)}`"
        unknown = list(_iter_unknown_keys(info, raw, []))
        if len(unknown) > 1:  # the keys of another method, say
            keys = ", ".join(f"`{_join_path(path, key)}`" for path, key, _ in unknown)
            tables = {_join_path(path): kinds for path, _, kinds in unknown}
            known_keys = "; ".join(
                f"{f'`{table}` has' if table else 'there are'} {', '.join(sorted(kinds))}"
                for table, kinds in tables.items()
            )
            return f"unknown keys {keys}; {known_keys}"
        return f"unknown key `{_join_path(steps, name)}`{did_you_mean(name, known)}"
    if match := _MISSING.match(message):
        path = _join_path(_split_path(match["path"]), match["name"])
        return f"expected a key `{path}`, found none"
    if match := _INVALID.match(message):
        steps = _split_path(match["path"])
        if known := _list_choices(info, raw, steps):
            meant = did_you_mean(match["name"].strip("'\""), known)
            return f"unknown `{_join_path(steps)}` = {match['name']}{meant}"
    return _explain_other(message, raw)


def _find_renamed(name: str, known: list[str]) -> str | None:
    new_names = _RENAMED_LEAST if name == "least" else (_RENAMED.get(name),)
    return next((new for new in new_names if new in known), None)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of an error about a wrong name: the most similar name, and all of them.

    >>> from pliant.suggestions import did_you_mean
    >>> did_you_mean("fedavgg", ["fedavg", "distreal"])
    "; did you mean 'fedavg'? There are distreal, fedavg"
    """
    names = sorted(known)
    close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.6)
    guess = f"did you mean {close[0]!r}? There are" if close else "there are"
    return f"; {guess} {', '.join(names)}" if names else ""


def _explain_other(message: str, raw: Any) -> str:
    """Reword any other error: TOML's words for types, and the value at the path."""
    match = _OTHER.match(message)
    if match is None:
        return message
    steps = _split_path(match["path"])
    text = _GOT_TYPE.sub("", match["name"]).replace(" - at `$.", " at `")
    for word, plain in _TYPE_WORDS.items():
        text = text.replace(word, plain)
    if " got " in text:  # the check of a Value, which quotes it already
        return f"{text}, in `{_join_path(steps)}`"
    for step in steps:
        try:
            raw = raw[int(step)] if isinstance(raw, list | tuple) else raw[step]
        except (KeyError, IndexError, TypeError, ValueError):
            return f"{text} at `{_join_path(steps)}`"
    return f"{text} at `{_join_path(steps)}`, got {raw!r}"


def _split_path(path: str | None) -> list[str]:
    return [name or index for name, index in _PATH_KEY.findall(path or "")]


def _join_path(keys: Iterable[str], last: str | None = None) -> str:
    return ".".join([*keys, last] if last is not None else keys)


def _follow_path(kind: inspect.Type, raw: Any, keys: list[str]) -> tuple[inspect.Type, Any]:
    """Return the type and the data at a path."""
    for step in keys:
        chosen = _select_type(kind, raw)
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


def _iter_unknown_keys(
    kind: inspect.Type, raw: Any, path: list[str]
) -> Iterator[tuple[list[str], str, list[str]]]:
    """Yield the unknown keys of nested tables: where, which, and the keys that are known there."""
    chosen = _select_type(kind, raw)
    if not isinstance(raw, dict) or not isinstance(chosen, inspect.StructType):
        return
    known = _list_keys(chosen)
    yield from ((path, key, known) for key in raw if key not in known)
    for field in chosen.fields:
        if field.encode_name in raw:
            inner = [*path, field.encode_name]
            yield from _iter_unknown_keys(field.type, raw[field.encode_name], inner)


def _select_type(kind: inspect.Type, raw: Any) -> inspect.Type:
    """Return one type of several: the one whose tag is in the data."""
    if not isinstance(kind, inspect.UnionType):
        return kind
    tag = raw.get("type") if isinstance(raw, dict) else None
    structs = _list_structs(kind)
    for part in structs:
        if part.tag == tag:
            return part
    return structs[0] if structs else kind


def _list_structs(kind: inspect.Type) -> list[inspect.StructType]:
    parts = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    return [part for part in parts if isinstance(part, inspect.StructType)]


def _list_keys(kind: inspect.Type) -> list[str]:
    if not isinstance(kind, inspect.StructType):
        return []
    tag = [kind.tag_field] if kind.tag_field else []
    return [*tag, *(field.encode_name for field in kind.fields)]


def _list_choices(kind: inspect.Type, raw: Any, keys: list[str]) -> list[str]:
    """Return what may stand at a path: a choice of words, or the tags of alternatives."""
    here, _ = _follow_path(kind, raw, keys)
    if isinstance(here, inspect.LiteralType):
        return [str(value) for value in here.values]
    if isinstance(here, inspect.UnionType):  # words, or tables
        literals = [part for part in here.types if isinstance(part, inspect.LiteralType)]
        words = [str(value) for part in literals for value in part.values]
        return words + [f'{{ type = "{part.tag}" }}' for part in _list_structs(here)]
    owner, _ = _follow_path(kind, raw, keys[:-1])
    return [str(part.tag) for part in _list_structs(owner) if part.tag is not None]
