"""Every public name has a docstring with an example that runs."""

import doctest
import inspect
from types import ModuleType

import pytest

import pliant

PUBLIC = sorted(pliant._read_exports())


def get_docstring(name):
    """Return a public object and its docstring, not one inherited from a parent."""
    public = getattr(pliant, name)
    text = vars(public).get("__doc__") if inspect.isclass(public) else public.__doc__
    return public, inspect.cleandoc(text or "")


def test_the_list_of_public_names_is_complete():
    assert set(PUBLIC) <= set(dir(pliant))
    assert len(PUBLIC) > 60


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_has_a_sentence_and_an_example(name):
    _, text = get_docstring(name)
    first = text.partition("\n")[0]
    assert first.endswith((".", "?")), f"{name}: expected a sentence, got {first!r}"
    assert ">>>" in text, f"{name}: expected an example"


@pytest.mark.parametrize("name", PUBLIC)
def test_an_example_runs(name):
    public, text = get_docstring(name)
    parsed = doctest.DocTestParser().get_doctest(text, {}, name, None, 0)
    failures = []
    doctest.DocTestRunner(verbose=False).run(parsed, out=failures.append)
    assert not failures, "".join(failures)
    assert isinstance(public, ModuleType) or parsed.examples
