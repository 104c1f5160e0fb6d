import math
import sys

import pytest

from pliant.extras import MissingExtra, need


def test_an_installed_library_is_given():
    assert need("math", "report") is math


def test_a_missing_library_is_told_in_one_line_with_the_command():
    with pytest.raises(MissingExtra) as caught:
        need("no_such_library.part", "report")
    assert str(caught.value) == (
        "no_such_library is not installed: run `pip install 'pliant[report]'`"
    )


def test_a_library_that_breaks_on_its_own_imports_is_not_called_missing(tmp_path, monkeypatch):
    (tmp_path / "broken_library.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency") as caught:
        need("broken_library", "report")
    assert not isinstance(caught.value, MissingExtra)
    assert "broken_library" not in sys.modules
