"""Experiment files near the schema, drawn by hypothesis: mostly plausible, some of it wrong."""

import copy
import json
import math

from hypothesis import strategies as st
from msgspec import inspect

from pliant.experiment.config import Experiment, SearchRun

BASE = {
    "rounds": 1,
    "per_round": 1,
    "method": {"type": "fedavg"},
    "fleet": {"size": 2},
    "network": {"options": {"hidden": 2}},
    "data": {"proxy": 7960},
    "workers": {"type": "inline"},
}
SMALL_SEARCH = {
    "algorithm": {"type": "fast", "per_site": 1, "min_design": 2, "rounds": 0, "vectors": 2},
    "objective": {"batches": 1, "batch": 4, "eval_images": 8},
    "corner_seeds": 1,
    "fresh_seeds": 1,
    "rows": 2,
}
# A list of workers would start processes.
KEYS = {
    command: {
        field.encode_name: field.type
        for field in inspect.type_info(kind).fields
        if field.encode_name != "workers"
    }
    for command, kind in (("run", Experiment), ("search", SearchRun))
}
INTEGERS = st.sampled_from([1, 2, 3, 0, -1, 10**23])
LARGE = [4, 7, 100, 10**4, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63), -(10**23)]
NUMBERS = st.sampled_from([0.0, 0.5, 1.0, 2.0, -1.0, math.nan, math.inf])
EXTREME = [-0.0, 5e-324, 1e-9, 1 - 1e-16, 1e9, 1e308, -1e308, -math.inf]
WORDS = st.sampled_from(["", "digits", "nowhere.py:name", "x" * 300, "ä"])
ODD = ["\n", "..", "/", "~", ":", "a:b", ".py:f", "\u202e", "nan", "None", "0", "{}", "%s", "a b"]
WRONG = st.sampled_from([True, "word", [], {}, [1], {"a": 1}, 0.5, -3])


class Drawing:
    """Strategies for values of the schema's types.

    A "near" drawing has some values that do not fit, a "wild" one extreme values too, and a
    "fitting" one small values of the right type alone, so that most of its files are run.
    """

    def __init__(self, style: str):
        self.style = style
        self.integers, self.numbers, self.words = INTEGERS, NUMBERS, WORDS
        if style == "wild":
            self.integers |= st.sampled_from(LARGE)
            self.numbers |= st.sampled_from(EXTREME)
            self.words |= st.sampled_from(ODD)
        elif style == "fitting":
            self.integers, self.numbers = st.integers(1, 3), st.sampled_from([0.25, 0.5, 1.0, 2.0])

    def make_values(self, kind):
        """Return a strategy for a type of the schema: mostly values that fit, some that do not."""
        fitting = self.make_fitting(kind)
        return fitting if self.style == "fitting" else st.one_of(fitting, fitting, fitting, WRONG)

    def make_fitting(self, kind):
        match kind:
            case inspect.BoolType():
                return st.booleans()
            case inspect.IntType():
                return self.integers
            case inspect.FloatType():
                return self.numbers
            case inspect.LiteralType():
                wrong = [] if self.style == "fitting" else ["wrong"]
                return st.sampled_from([*kind.values, *wrong])
            case inspect.UnionType():
                kinds = [part for part in kind.types if not isinstance(part, inspect.NoneType)]
                return st.sampled_from(kinds).flatmap(self.make_values)
            case inspect.StructType():
                return self.make_table(kind)
            case inspect.VarTupleType() | inspect.ListType():
                return st.lists(st.deferred(lambda: self.make_values(kind.item_type)), max_size=2)
            case inspect.TupleType():
                return st.tuples(*map(self.make_values, kind.item_types)).map(list)
            case inspect.DictType():
                keys = st.sampled_from(["hidden", "ä b"])
                return st.dictionaries(keys, self.integers, max_size=1)
        return self.words

    def make_table(self, kind):
        """Return a strategy for a table: a few of its keys, now and then a wrong one."""
        fields = {field.encode_name: field.type for field in kind.fields}
        required = [field.encode_name for field in kind.fields if field.required]
        count = 2 if self.style == "near" else 4
        names = (
            st.lists(st.sampled_from(sorted(fields)), max_size=count, unique=True)
            if fields
            else st.just([])
        )

        @st.composite
        def draw_table(draw):
            table = {} if kind.tag is None else {kind.tag_field: kind.tag}
            for name in dict.fromkeys([*required, *draw(names)]):
                table[name] = draw(self.make_values(fields[name]))
            if self.style != "fitting" and draw(st.integers(0, 9)) == 0:
                table[draw(st.sampled_from(["typo", "type", "lr"]))] = draw(WRONG)
            return table

        return draw_table()


@st.composite
def make_documents(draw, command="run", style="near"):
    """Return a small file for a command, with one or two of its keys drawn anew."""
    drawing = Drawing(style)
    document, kinds = copy.deepcopy(BASE), KEYS["search" if command == "search" else "run"]
    if command == "search":
        document["search"] = copy.deepcopy(SMALL_SEARCH)
    keys = st.lists(st.sampled_from(sorted(kinds)), min_size=1, max_size=2, unique=True)
    for key in draw(keys):
        value = draw(drawing.make_values(kinds[key]))
        if key == "search" and command == "search" and isinstance(value, dict):
            value = SMALL_SEARCH | value
        document[key] = 1 if key == "rounds" and value in (2, 3) else value
    if command == "compare":
        document["matrix"] = draw(make_matrices())
    return document


@st.composite
def make_matrices(draw):
    """Return a [matrix]: a few axes, now and then not one."""
    values = st.lists(st.sampled_from([0, 1, 0.5, "", "digits", True, []]), max_size=2)
    tables = st.dictionaries(st.sampled_from(["a", "a/b", "", "ä", ".."]), WRONG, max_size=2)
    keys = ["seed", "rounds", "method", "method.local.batch", "", "a..b", "fleet.size", "typo", "."]
    axes = st.dictionaries(st.sampled_from(keys), st.one_of(values, tables, WRONG), max_size=2)
    return draw(st.one_of(axes, axes, axes, WRONG))


@st.composite
def make_damaged_texts(draw, text):
    """Return the text of a file with a part removed, repeated or replaced."""
    start = draw(st.integers(0, len(text)))
    end = min(len(text), start + draw(st.integers(0, 40)))
    middle = draw(st.sampled_from(["", "\n", '"', "[", "]", "{", "=", "1", "\0", "#", "ä", "\r"]))
    repeated = draw(st.booleans())
    return text[:start] + (2 * text[start:end] if repeated else middle) + text[end:]


def format_file(document):
    return "".join(f"{json.dumps(key)} = {format_toml(item)}\n" for key, item in document.items())


def format_toml(value):
    if isinstance(value, dict):
        pairs = (f"{json.dumps(key)} = {format_toml(item)}" for key, item in value.items())
        return f"{{ {', '.join(pairs)} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(format_toml, value))}]"
    if isinstance(value, float):
        return str(value)  # also nan and inf
    return json.dumps(value)
