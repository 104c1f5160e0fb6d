"""Every public name has a docstring with an example, and the example is true."""

import doctest
import inspect
from types import ModuleType

import pytest

import pliant

PUBLIC = sorted({*pliant._WHERE, *pliant._MODULES})


def documented(name):
    """Return what a name stands for, and the docstring that is its own and not a parent's."""
    found = getattr(pliant, name)
    text = vars(found).get("__doc__") if inspect.isclass(found) else found.__doc__
    return found, inspect.cleandoc(text or "")


def test_the_list_of_public_names_is_whole():
    assert set(PUBLIC) <= set(dir(pliant))
    assert len(PUBLIC) > 60


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_has_a_sentence_and_an_example(name):
    _, text = documented(name)
    first = text.partition("\n")[0]
    assert first.endswith((".", "?")), f"{name}: expected a sentence, got {first!r}"
    assert ">>>" in text, f"{name}: expected an example"


@pytest.mark.parametrize("name", PUBLIC)
def test_an_example_is_true(name):
    found, text = documented(name)
    parsed = doctest.DocTestParser().get_doctest(text, {}, name, None, 0)
    told = []
    doctest.DocTestRunner(verbose=False).run(parsed, out=told.append)
    assert not told, "".join(told)
    assert isinstance(found, ModuleType) or parsed.examples
