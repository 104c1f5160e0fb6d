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


def test_a_library_whose_own_imports_fail_is_not_called_missing(tmp_path, monkeypatch):
    (tmp_path / "broken_library.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency") as caught:
        require("broken_library", "report")
    assert not isinstance(caught.value, MissingExtra)
    assert "broken_library" not in sys.modules
