"""Any TOML file near the schema gives a run or one clear line, and a refused one leaves nothing."""

import copy
import io
import json
import math
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import inspect

from pliant.cli import main
from pliant.experiment.config import Experiment

BASE = {
    "rounds": 1,
    "per_round": 1,
    "method": {"type": "fedavg"},
    "fleet": {"size": 2},
    "network": {"options": {"hidden": 2}},
    "data": {"proxy": 7960},
    "workers": {"type": "inline"},
}
# A list of workers would start processes; a search is not run by `pliant run`.
KEYS = {
    field.encode_name: field.type
    for field in inspect.type_info(Experiment).fields
    if field.encode_name not in ("workers", "search")
}
INTEGERS = st.sampled_from([1, 2, 3, 0, -1, 10**23])
NUMBERS = st.sampled_from([0.0, 0.5, 1.0, 2.0, -1.0, math.nan, math.inf])
WORDS = st.sampled_from(["", "digits", "nowhere.py:name", "x" * 300, "ä"])
WRONG = st.sampled_from([True, "word", [], {}, [1], {"a": 1}, 0.5, -3])


def make_values(kind):
    """Return a strategy for a type of the schema: mostly values that fit, some that do not."""
    return st.one_of(make_fitting(kind), make_fitting(kind), make_fitting(kind), WRONG)


def make_fitting(kind):
    match kind:
        case inspect.BoolType():
            return st.booleans()
        case inspect.IntType():
            return INTEGERS
        case inspect.FloatType():
            return NUMBERS
        case inspect.LiteralType():
            return st.sampled_from([*kind.values, "wrong"])
        case inspect.UnionType():
            kinds = [part for part in kind.types if not isinstance(part, inspect.NoneType)]
            return st.sampled_from(kinds).flatmap(make_values)
        case inspect.StructType():
            return make_table(kind)
        case inspect.VarTupleType() | inspect.ListType():
            return st.lists(st.deferred(lambda: make_values(kind.item_type)), max_size=2)
        case inspect.TupleType():
            return st.tuples(*map(make_values, kind.item_types)).map(list)
        case inspect.DictType():
            return st.dictionaries(st.sampled_from(["hidden", "ä b"]), INTEGERS, max_size=1)
    return WORDS


def make_table(kind):
    """Return a strategy for a table: a few of its keys, now and then a wrong one."""
    fields = {field.encode_name: field.type for field in kind.fields}
    required = [field.encode_name for field in kind.fields if field.required]
    names = st.lists(st.sampled_from(sorted(fields)), max_size=2, unique=True) if fields else None

    @st.composite
    def draw_table(draw):
        table = {} if kind.tag is None else {kind.tag_field: kind.tag}
        for name in dict.fromkeys([*required, *(draw(names) if fields else ())]):
            table[name] = draw(make_values(fields[name]))
        if draw(st.integers(0, 9)) == 0:
            table[draw(st.sampled_from(["typo", "type", "lr"]))] = draw(WRONG)
        return table

    return draw_table()


@st.composite
def make_documents(draw):
    """Return a small experiment with one or two of its keys drawn anew."""
    document = copy.deepcopy(BASE)
    for key in draw(st.lists(st.sampled_from(sorted(KEYS)), min_size=1, max_size=2, unique=True)):
        value = draw(make_values(KEYS[key]))
        if key == "rounds" and value in (2, 3):
            value = 1
        document[key] = value
    return document


def format_toml(value):
    if isinstance(value, dict):
        pairs = (f"{json.dumps(key)} = {format_toml(item)}" for key, item in value.items())
        return f"{{ {', '.join(pairs)} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(format_toml, value))}]"
    if isinstance(value, float):
        return str(value)  # also nan and inf
    return json.dumps(value)


def check_document(document):
    """Run a document: it ends with a run, or with one line and without files."""
    text = "".join(f"{key} = {format_toml(value)}\n" for key, value in document.items())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "file.toml")
        path.write_text(text)
        output, errors = io.StringIO(), io.StringIO()
        with redirect_stdout(output), redirect_stderr(errors):
            code = main(["run", str(path), "--out", str(Path(folder, "runs", "run"))])
        if code == 0:
            assert Path(folder, "runs", "run", "events.jsonl").exists(), text
            return
        line = errors.getvalue()
        assert code == 2, f"{text}\n{line}"
        assert line.startswith("pliant: "), f"{text}\n{line}"
        assert line.count("\n") == 1, f"{text}\n{line}"
        assert "internal error" not in line, f"{text}\n{line}"
        assert [found.name for found in Path(folder).iterdir()] == ["file.toml"], text


CHECKS = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))


@settings(CHECKS, max_examples=12, derandomize=True)
@given(make_documents())
def test_a_file_near_the_schema_is_run_or_refused_in_one_line(document):
    check_document(document)


@pytest.mark.slow
@settings(CHECKS, max_examples=2000)
@given(make_documents())
def test_two_thousand_files_near_the_schema(document):
    check_document(document)
