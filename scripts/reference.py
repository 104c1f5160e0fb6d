"""Write docs/reference.md from the code: public names, TOML keys, commands, exit codes.

python scripts/reference.py            writes the page
python scripts/reference.py --check    exit code 1 if the page is not what the code says
"""

import ast
import inspect
import sys
import textwrap
import typing
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import docstring_parser
import msgspec
from cyclopts import App
from docstring_parser import DocstringStyle

import pliant
from pliant import cli
from pliant.experiment import Experiment, SearchRun

PAGE = Path(__file__).parents[1] / "docs" / "reference.md"
COMMAND = "python scripts/reference.py"

HEAD = f"""\
# Reference

Made from the code by `{COMMAND}`; do not edit it by hand. What a name is for stands in the
[how-to pages](howto/index.md); this page says what there is.
"""

NUMBERS = {
    "Count": "whole number of 1 or more",
    "Natural": "whole number of 0 or more",
    "Positive": "number above 0",
    "NonNegative": "number of 0 or more",
    "Fraction": "number from 0 to 1",
    "Memory": "number from 0 to below 1",
    "Width": "number above 0 and up to 1",
}


class Field(NamedTuple):
    """One field of a class, as its source says it."""

    name: str
    kind: str
    default: str
    remark: str


def page() -> str:
    """Return the whole page."""
    parts = [HEAD, commands(), keys(), names()]
    return "\n".join(parts).rstrip() + "\n"


def commands() -> str:
    """Describe every command and its options."""
    lines = ["## Commands", "", "Every command has `--help`; `--debug` shows a traceback.", ""]
    lines += ["| exit code | meaning |", "|---|---|"]
    codes = {
        cli.DONE: "done",
        cli.FAILED: "a failed run, a limit that was missed, or a fault of pliant",
        cli.WRONG_INPUT: "wrong input or usage",
        cli.INTERRUPTED: "interrupted; the run can be gone on with",
    }
    lines += [f"| {code} | {meaning} |" for code, meaning in codes.items()] + [""]
    for name, _, purpose in cli.COMMANDS:
        app = cli.build(name, is_plain=True)[name]
        inner = [one for one in app if not one.startswith("-")]
        if not inner:
            lines += command(f"pliant {name}", app)
            continue
        lines += [f"### pliant {name}", "", purpose, ""]
        for one in inner:
            lines += command(f"pliant {name} {one}", app[one])
    return "\n".join(lines)


def command(title: str, app: App) -> list[str]:
    """Describe one command: what it does, its examples and its options."""
    made = app.default_command
    assert made is not None
    text = inspect.cleandoc(made.__doc__ or "")
    style = DocstringStyle.NUMPYDOC if "\n----" in text else DocstringStyle.GOOGLE
    told = {
        one.arg_name: one.description or "" for one in docstring_parser.parse(text, style).params
    }
    lines = [f"### {title}", "", text.partition("\n")[0], ""]
    examples = [
        line.partition(": ")[2] for line in text.splitlines() if line.startswith("Example:")
    ]
    lines += ["```", *examples, "```", ""] if examples else []
    rows = [argument(one, told) for one in app.assemble_argument_collection()]
    if rows:
        lines += ["| option | default | meaning |", "|---|---|---|", *rows, ""]
    return lines


def argument(one: Any, told: dict[str, str]) -> str:
    """Return the row of one argument of a command."""
    field = one.field_info
    shown = field.name.upper() if "POSITIONAL" in str(field.kind) else one.names[0]
    shown += "..." if "VAR_POSITIONAL" in str(field.kind) else ""
    default = "" if _is_nothing(field.default) else f"`{field.default}`"
    if one.required:
        default = "required"
    if field.default is True:
        shown, default = "`, `".join(one.names), "on"
    words = " ".join(told.get(field.name, "").split())
    return f"| `{shown}` | {default} | {_cell(words)} |"


def _is_nothing(default: object) -> bool:
    return default is inspect.Parameter.empty or default in (None, "", ()) or default is False


def keys() -> str:
    """Describe every key that a TOML file may have."""
    lines = [
        "## TOML keys",
        "",
        "A table like `[fleet]` has the fields of the class that is named; `type` says which of",
        "several it is. `[matrix]` lists values of any key by its dotted path.",
        "",
        "| word | means |",
        "|---|---|",
        *(f"| `{word}` | {meaning} |" for word, meaning in NUMBERS.items()),
        "",
    ]
    for root, title in ((Experiment, "run and compare"), (SearchRun, "search")):
        lines += [f"### Keys of a file for {title}", "", *_table(root), ""]
    public = {getattr(pliant, name) for name in pliant._WHERE}
    for kind in sorted(reached(), key=lambda kind: (kind.__module__, kind.__qualname__)):
        if kind not in public and kind not in (Experiment, SearchRun):
            where = kind.__module__.removeprefix("pliant.")
            lines += described(f"{where}.{kind.__qualname__}", kind)
    return "\n".join(lines)


def names() -> str:
    """Describe every public name of `pliant`."""
    lines = ["## Names in `pliant`", "", "`import pliant as pl` gives all of these.", ""]
    for name in sorted([*pliant._WHERE, *pliant._MODULES], key=str.lower):
        lines += described(name, getattr(pliant, name))
    return "\n".join(lines)


def described(name: str, found: Any) -> list[str]:
    """Return the section of one name."""
    text = inspect.cleandoc(found.__doc__ or "").partition("\n")[0]
    tag = getattr(getattr(found, "__struct_config__", None), "tag", None)
    lines = [f"### {name}", "", text + (f' In a file: `type = "{tag}"`.' if tag else ""), ""]
    if isinstance(found, ModuleType):
        inner = ", ".join(f"`{one}`" for one in sorted(vars(found)) if _is_shown(found, one))
        return [*lines, f"Has {inner}.", ""]
    if inspect.isclass(found):
        return [*lines, *_table(found), ""] if list(fields(found)) else lines
    return [*lines, "```python", _signature(name, found), "```", ""]


def reached() -> set[type]:
    """Return every class whose fields a TOML file can set."""
    found: set[type] = set()
    waiting: list[Any] = [Experiment, SearchRun]
    while waiting:
        kind = waiting.pop()
        if inspect.isclass(kind) and issubclass(kind, msgspec.Struct):
            if kind in found:
                continue
            found.add(kind)
            waiting += typing.get_type_hints(kind, include_extras=True).values()
        else:
            waiting += [part for part in typing.get_args(kind) if not isinstance(part, str)]
    return found


def fields(kind: type) -> Iterator[Field]:
    """Yield the fields of a class with the types, defaults and remarks of its source."""
    if not (issubclass(kind, msgspec.Struct) or is_dataclass(kind)):
        return
    source = textwrap.dedent(inspect.getsource(kind))
    lines = source.splitlines()
    [body] = ast.parse(source).body
    assert isinstance(body, ast.ClassDef)
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            assert node.end_lineno is not None
            last = lines[node.end_lineno - 1].encode()[node.end_col_offset or 0 :].decode()
            remark = last.partition("#")[2].strip()
            default = ast.unparse(node.value) if node.value else ""
            default = "{}" if "default_factory=dict" in default else default
            yield Field(node.target.id, ast.unparse(node.annotation), default, remark)


def _table(kind: type) -> list[str]:
    rows = ["| field | type | default | |", "|---|---|---|---|"]
    for field in fields(kind):
        default = f"`{_cell(field.default)}`" if field.default else "required"
        choices = _choices(kind, field)
        remark = "; ".join(part for part in (choices, field.remark) if part)
        rows.append(f"| `{field.name}` | `{_cell(field.kind)}` | {default} | {_cell(remark)} |")
    return rows


def _choices(kind: type, field: Field) -> str:
    """Name the alternatives where a field's type is a name for several classes."""
    hint = typing.get_type_hints(kind)[field.name]
    tags = [
        part.__struct_config__.tag
        for part in typing.get_args(hint)
        if inspect.isclass(part) and issubclass(part, msgspec.Struct)
    ]
    words = [str(part) for part in typing.get_args(hint) if isinstance(part, str)]
    if len(tags) > 1:
        return "type: " + ", ".join(f"`{tag}`" for tag in tags)
    is_named = bool(words) and "Literal" not in field.kind
    return "one of " + ", ".join(f"`{word}`" for word in words) if is_named else ""


def _is_shown(module: ModuleType, name: str) -> bool:
    found = getattr(module, name)
    return inspect.isfunction(found) and not name.startswith("_")


def _signature(name: str, found: Any) -> str:
    """Return a function's signature as its source has it: no addresses of objects in it."""
    [node] = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(found)))).body
    assert isinstance(node, ast.FunctionDef)
    returned = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return "\n".join(
        textwrap.wrap(f"{name}({ast.unparse(node.args)}){returned}", 100, subsequent_indent="    ")
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> int:
    """Write the page, or say that it is old."""
    made = page()
    if "--check" in sys.argv[1:]:
        is_new = PAGE.exists() and PAGE.read_text() == made
        sys.stdout.write("" if is_new else f"{PAGE.name} is old: run `{COMMAND}`\n")
        return 0 if is_new else 1
    PAGE.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
