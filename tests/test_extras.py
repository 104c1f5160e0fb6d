import math
import sys

import pytest

from pliant.extras import MissingExtra, require


def test_an_installed_library_is_returned():
    assert require("math", "report") is math


def test_the_error_for_a_missing_library_names_the_command():
    with pytest.raises(MissingExtra) as caught:
        require("no_such_library.part", "report")
    assert str(caught.value) == (
        "no_such_library is not installed: run `pip install 'pliant[report]'`"
    )


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("import no_such_dependency", "ModuleNotFoundError: No module named 'no_such_dependency'"),
        ("raise AttributeError('built for numpy 1')", "AttributeError: built for numpy 1"),
    ],
)
def test_a_library_that_fails_to_import_is_not_called_missing(
    source, problem, tmp_path, monkeypatch
):
    (tmp_path / "broken_library.py").write_text(f"{source}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingExtra) as caught:
        require("broken_library", "report")
    assert str(caught.value) == (
        f"broken_library is installed but fails to import ({problem}): "
        "run `pip install --force-reinstall 'pliant[report]'`"
    )
    assert "broken_library" not in sys.modules
